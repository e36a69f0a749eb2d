"""`moonrelay COMMAND ...`: the composition root. A command's module is imported only when it is asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence

from moonrelay.errors import SettingsError

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("moonrelay.up", "start a whole cluster on this machine, in the foreground"),
    "demo": ("moonrelay.demo", "start a cluster, send real requests, print what happened, stop"),
    "router": ("router.main", "HTTP and gRPC frontends; routes to workers"),
    "prefill": ("prefill.main", "computes prompts and hands them over"),
    "decode": ("decode.main", "adopts handoffs and generates (--aggregated: does both itself)"),
    "cachestore": ("cachestore.main", "owns cached blocks and snapshots on one host"),
    "replay": ("sim.replay", "a request trace through the cache's real cores: hit rate by policy and budget"),
    "sim": ("sim.main", "the cluster's cores in one thread, with faults; every invariant checked"),
    "logits": ("model.logits", "every position's logits of a checkpoint"),
    "train-nano": ("train.main", "train the small model"),
    "train-draft": ("train.draft", "train a drafter on what its target writes, as Ray actors or alone"),
    "eval-nano": ("train.eval", "measure the small model on held-out data"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit status: 0 done, 1 failed, 2 asked for wrongly."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if sys.flags.optimize:
        print("moonrelay: python -O removes the assertions that guard state; run without it", file=sys.stderr)
        return 2
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"moonrelay: unknown command {argv[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    # UCX's EFA module crashes the process at exit on hosts with the distribution's verbs libraries; it must be
    # off before anything can create an agent.
    os.environ.setdefault("UCX_MODULES", "^efa")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its lines repeat what we say of a port or a peer
    command: Callable[[Sequence[str]], int | None] = importlib.import_module(COMMANDS[argv[0]][0]).main
    try:
        return command(argv[1:]) or 0
    except SettingsError as error:
        print(f"moonrelay {argv[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _usage() -> str:
    lines = [f"  {name:<12} {about}" for name, (_, about) in COMMANDS.items()]
    return "usage: moonrelay COMMAND [options]   (COMMAND --help shows its options)\n\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
