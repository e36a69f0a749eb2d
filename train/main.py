"""`moonrelay train-nano`: fetch the corpus, build rows, train (or resume) and export k3-nano."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from model.tokenizer import VOCABULARY_FILE, Tokenizer
from train import checkpoint, corpus, data, plot, vocabulary
from train.run import LOG_FILE, Run, Settings, append_log

WORK = Path(__file__).parent / ".work"
SOURCES = Path(__file__).parent / "sources.json"
ZOO = Path(__file__).parent.parent / "model" / "zoo" / "k3_nano"

# glibc's default gives each step's activations back to the kernel and faults them in anew; its allocator reads the
# environment before Python runs, so `main` starts itself again with these.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}

log = logging.getLogger("train")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="moonrelay train-nano", description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK, help="downloads, rows and run (default train/.work)")
    parser.add_argument("--copy-to", type=Path, help="a second folder that every checkpoint is copied to")
    parser.add_argument("--minutes", type=float, help="budget in minutes of training, resumed time included")
    parser.add_argument("--tokens", type=int, help="budget in tokens")
    parser.add_argument("--decay", type=float, default=0.3, help="share of the budget that cools down at the end")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="do not compile (starts at once, trains slower)")
    parser.add_argument("--fresh", action="store_true", help="start anew even if there is a checkpoint")
    parser.add_argument("--export", type=Path, help="write the checkpoint of the run's current state there and stop")
    return parser.parse_args(argv)


def prepare(work: Path) -> Path:
    """Make whatever is missing: archives, corpus, vocabulary, rows. Returns the vocabulary's path."""
    work.mkdir(exist_ok=True)
    if not (work / "corpus" / "train.jsonl").exists():
        corpus.fetch(json.loads(SOURCES.read_text()), work / "dl")
        log.info("corpus bytes: %s", corpus.build(work))
    path = work / VOCABULARY_FILE
    if not path.exists():
        texts = [document.text for document in corpus.read(work, "train")[: vocabulary.NUM_DOCUMENTS]]
        bpe = vocabulary.train(texts + vocabulary.FORMAT_TEXTS)
        vocabulary.write(vocabulary.ranks(bpe), work)
        validation = [document.text for document in corpus.read(work, "validation")]
        vocabulary.verify(bpe, Tokenizer.load(work), validation)
    if not (work / "rows" / "text.npz").exists():
        log.info("row tokens: %s", data.build(work, work))
    return path


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        os.environ.update(MALLOC)
        os.execv(sys.executable, [sys.executable, "-m", "train.main", *(sys.argv[1:] if argv is None else argv)])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)  # decayed keys fall below 1e-38, where arithmetic is a hundred times slower
    path = prepare(args.work)
    settings = Settings(
        work=args.work,
        folder=args.work / "run",
        copy_to=args.copy_to,
        vocabulary=args.work,
        tokens=args.tokens,
        minutes=args.minutes,
        decay=args.decay,
        seed=args.seed,
        compiled=not args.eager,
    )
    run = Run(settings)
    resumed = not args.fresh and run.resume()
    if args.export is not None:
        checkpoint.export(run.params, run.config, path, args.export)
        log.info("exported step %d to %s", run.step, args.export)
        return 0
    if args.tokens is None and args.minutes is None:
        raise SystemExit("train-nano: give a budget, --tokens or --minutes")
    log.info("%s at step %d", "resumed" if resumed else "started", run.step)

    def report(record: dict[str, Any]) -> None:
        append_log(settings.folder, record)
        log.info(" ".join(f"{name} {value}" for name, value in record.items()))

    run.train(report)
    plot.write(settings.folder / LOG_FILE, settings.folder / "loss.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
