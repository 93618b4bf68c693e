"""``python -m tests.chaos``: some minutes of faults, and what has come of every task."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.chaos.faults import FAULTS
from tests.chaos.run import Plan, new_seed, play


def main(arguments: list[str]) -> int:
    """Run; return the exit code: 0 when nothing was lost, done twice or otherwise wrong."""
    options = _parser().parse_args(arguments)
    if options.list:
        print("\n".join(FAULTS))
        return 0
    kinds = tuple(kind for kind in FAULTS if any(part in kind for part in options.only or [""]))
    plan = Plan(
        seed=new_seed() if options.seed is None else options.seed,
        seconds=options.minutes * 60,
        broker=options.broker,
        kinds=tuple(kind for kind in kinds if not any(part in kind for part in options.without)),
        pause=options.pause,
        per_second=options.rate,
        settle=options.settle,
        folder=options.folder,
    )
    report = play(plan, lambda text: print(text, flush=True))
    print(report.text())
    return 0 if report.is_good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (10)")
    parser.add_argument("--seed", type=int, help="of the schedule and the tasks; printed at the start")
    parser.add_argument("--broker", choices=["rabbitmq", "redis"], default="rabbitmq")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="faults with one of these in their name")
    parser.add_argument("--without", nargs="+", metavar="TEXT", default=[], help="no such faults")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two faults (2)")
    parser.add_argument("--rate", type=float, default=1.0, help="tasks, chains and chords a second (1)")
    parser.add_argument("--settle", type=float, default=120.0, help="seconds to settle (120)")
    parser.add_argument("--folder", type=Path, help="keep logs, witness and faults here")
    parser.add_argument("--list", action="store_true", help="list the faults")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
