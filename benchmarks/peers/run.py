"""Runs in a peer's own environment: ``python -m benchmarks.peers.run MODULE ACTION '{…}'``.

A module has three actions. ``prepare`` makes the tables; ``fill`` creates jobs; ``work`` runs a worker until
it is killed. The body of each job marks when it runs. The last line of what is printed is the seconds that
the action took, without what was imported for it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Jobs:
    """Jobs to create. ``what``: "noop", "step", "sleep" (then noop) or "park" (mark, then sleep)."""

    what: str
    label: str
    count: int
    #: Seconds since the epoch; 0: at once.
    first: float
    #: Seconds from one due time to the next.
    gap: float

    @property
    def dues(self) -> list[float]:
        return [self.first + number * self.gap for number in range(self.count)]


def main() -> None:
    """Call an action with keyword arguments; ``jobs`` becomes `Jobs`."""
    module, action, text = sys.argv[1:]
    arguments = json.loads(text)
    if "jobs" in arguments:
        arguments["jobs"] = Jobs(**arguments["jobs"])
    call = getattr(importlib.import_module(f"benchmarks.peers.{module}"), action)
    began = time.monotonic()
    call(**arguments)
    print(time.monotonic() - began, flush=True)


if __name__ == "__main__":
    main()
