"""Every trace through `moonrelay replay`; writes results/replay.json with the commit, and a plot for each."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sim.replay import main as replay

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("MOONRELAY_SHARED", ROOT.parent / "shared"))
TRACES = {
    "conversation": str(SHARED / "traces" / "conversation_trace.jsonl"),
    "synthetic": str(SHARED / "traces" / "synthetic_trace.jsonl"),
    "tool-loops": "tool-loops:1",
}


def run(trace: str, arguments: list[str]) -> dict[str, Any]:
    """The command's last line."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        replay([trace, "--json", *arguments])
    lines = shown.getvalue().splitlines()
    print("\n".join(lines[:-1]), flush=True)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-tb", nargs="+", default=["1"])
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "replay.json")
    args = parser.parse_args()
    if missing := [trace for trace in TRACES.values() if trace.endswith(".jsonl") and not Path(trace).is_file()]:
        parser.error(f"expected Mooncake's traces in $MOONRELAY_SHARED/traces, found no {' and no '.join(missing)}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    result: dict[str, Any] = {"commit": commit, "traces": {}}
    args.out.parent.mkdir(exist_ok=True)
    for name, trace in TRACES.items():
        began = time.monotonic()
        plot = args.out.with_name(f"replay-{name}.svg")
        found = run(trace, ["--budget-tb", *args.budget_tb, "--plot", str(plot)])
        load, seconds = round(os.getloadavg()[0], 1), round(time.monotonic() - began, 1)
        result["traces"][name] = found | {"trace": name, "load": load, "seconds": seconds}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
