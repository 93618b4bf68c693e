"""Strikes and heals by a seeded schedule."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from tests.chaos.faults import FAULTS, Struck
from tests.chaos.site import Stage

#: Faults that last at the same time.
AT_ONCE = 3


class Injector:
    """Does faults to a stage, one after the other, several at a time.

    What comes when is drawn from the seed; what it hits, from what is whole by then.
    """

    def __init__(self, stage: Stage, seed: str, kinds: Collection[str], pause: float, log: Path) -> None:
        """`kinds`: of `FAULTS`; `pause`: seconds from one fault to the next, on average."""
        self.struck: Counter[str] = Counter()
        self._stage = stage
        self._random = random.Random(seed)
        self._kinds = list(kinds)
        self._weights = [FAULTS[kind][0] for kind in self._kinds]
        self._pause = pause
        self._log = log
        self._open: list[tuple[float, str, Struck]] = []

    def run(self, seconds: float) -> None:
        """Strike for so long, then take everything back."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if len(self._open) < AT_ONCE:
                self.strike()
            pause = time.monotonic() + self._random.uniform(0.4, 1.6) * self._pause
            while time.monotonic() < min(pause, end):
                self._take_back()
                self._stage.look_after()
                time.sleep(0.05)
        self._take_back(everything=True)

    def strike(self) -> None:
        """Do the next fault, if there is something that it can be done to."""
        kind = self._random.choices(self._kinds, self._weights)[0]
        dice = random.Random(self._random.random())
        at = time.time()
        struck = FAULTS[kind][1](self._stage, dice)
        if struck is None:
            return
        self.struck[kind] += 1
        self._note(at, kind, struck)
        self._stage.broken |= set(struck.target.split("+"))
        self._open.append((time.monotonic() + struck.seconds, kind, struck))

    def _take_back(self, *, everything: bool = False) -> None:
        for item in list(self._open):
            due, kind, struck = item
            if everything or due <= time.monotonic():
                struck.heal()
                self._note(time.time(), f"healed: {kind}", struck)
                self._stage.broken -= set(struck.target.split("+"))
                self._open.remove(item)

    def _note(self, at: float, what: str, struck: Struck) -> None:
        line = {"time": round(at, 3), "what": what, "target": struck.target, "detail": struck.detail}
        with self._log.open("a") as log:
            log.write(json.dumps(line | {"seconds": round(struck.seconds, 2)}) + "\n")
