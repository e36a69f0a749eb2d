"""`moonrelay train-draft`: train a drafter for k3-nano, in this process or as Ray actors on one machine or many."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from model.tokenizer import Tokenizer
from train.draft_eval import held_out_prompts
from train.draft_prompts import CorpusPrompts
from train.draft_roles import DraftSettings, write_held_out
from train.draft_run import Journal, run_alone
from train.draft_trainer import TrainerSettings
from train.eval import ZOO
from train.main import prepare

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
GOING_ON = TrainerSettings(rate=1.0, decay=0.9, ce_first=0.3)  # where weights are trained already
HELD_OUT = 16  # prompts of each kind


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="moonrelay train-draft", description=__doc__)
    parser.add_argument("--model", type=Path, default=ZOO, help="the target's checkpoint")
    parser.add_argument("--work", type=Path, default=FOLDER / ".work", help="corpus and rows, made where missing")
    parser.add_argument("--folder", type=Path, help="state, log, curve and drafter (default: WORK/draft); resumed")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall time of the whole run, resumes included")
    parser.add_argument("--start", type=Path, help="a drafter to go on from, of the same sizes or narrower ones")
    parser.add_argument("--generators", type=int, default=1, help="actors that run the target")
    parser.add_argument("--trainers", type=int, default=1, help="actors that learn")
    parser.add_argument("--queue", type=int, default=4, help="written batches that may wait for each trainer")
    parser.add_argument(
        "--address", help="a running Ray cluster's (`auto` on one of its nodes); default: this machine"
    )
    parser.add_argument("--alone", action="store_true", help="no Ray: generate and learn by turns in this process")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name in ("generators", "trainers", "queue"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    prepare(args.work)
    tokenizer = Tokenizer.load(args.model)
    settings = DraftSettings(
        model_dir=args.model.resolve(),
        folder=(args.folder or args.work / "draft").resolve(),
        stop=tokenizer.eos,
        mask_id=tokenizer.vocab_size - 1,  # a special token that no text has
        seed=args.seed,
        trainer=TrainerSettings() if args.start is None else GOING_ON,
        start=args.start and args.start.resolve(),
    )
    prompts = CorpusPrompts(args.work.resolve(), args.model.resolve())
    journal = Journal(settings.folder, args.minutes)
    asked = held_out_prompts(args.work, tokenizer, HELD_OUT)
    if args.alone:
        run_alone(settings, prompts, write_held_out(settings, asked), journal, log.info)
        return 0
    try:
        from train import draft_ray  # Ray is an extra
    except ImportError as error:
        raise SystemExit(f"train-draft: {error}; install the `train` extra, or pass --alone") from error
    fleet = draft_ray.Fleet(
        generators=args.generators, trainers=args.trainers, queue_max=args.queue, address=args.address
    )
    draft_ray.connect(fleet)
    draft_ray.Pipeline(settings, fleet, prompts, journal, log.info).run(asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
