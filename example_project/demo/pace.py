"""How long a day is, and how long to wait: both follow what this machine needs to start a process."""

from __future__ import annotations

import math
from dataclasses import dataclass

USUAL_DAY_SECONDS = 3.0
USUAL_BOOT_SECONDS = 6.0
"""What a start of worker and beat may take without a word."""
MAX_SECONDS = 57.0
"""For everything, with usual days and usual starts."""
MAX_BOOT_SECONDS = 180.0
MAX_ATTEMPTS = 3
DAYS_IN_ALL = 7.4
PLANNED_BOOT_DAYS = 2.0
"""A start may take two of the three days that the tasks sleep."""
DAYS_PER_BOOT = 1 / 1.5


class TooSlow(Exception):
    """The play cannot keep to its days on this machine; it can with `day_seconds`."""

    def __init__(self, what: str, day_seconds: float) -> None:
        minutes = math.ceil(DAYS_IN_ALL * day_seconds / 60) + 1
        super().__init__(
            f"this machine is slow: a day takes {day_seconds:g} s, all of it some {minutes} minutes ({what})"
        )
        self.day_seconds = day_seconds


@dataclass(frozen=True)
class Pace:
    """`is_exact`: the days are as long as they are, whether the machine keeps up or not."""

    day_seconds: float
    is_exact: bool = False
    attempt: int = 1

    @property
    def max_seconds(self) -> float:
        """How long everything may take that is not the start of a process."""
        return MAX_SECONDS + DAYS_IN_ALL * max(0.0, self.day_seconds - USUAL_DAY_SECONDS)

    def check_boot(self, seconds: float) -> None:
        """Raises TooSlow where a second start that takes as long would come too late."""
        if seconds > PLANNED_BOOT_DAYS * self.day_seconds:
            self._give_up(f"worker and beat took {seconds:.1f} s to start", seconds)

    def check_day(self, day: float, limit: float, what: str) -> None:
        """Raises TooSlow where it is later than day `limit`."""
        if day > limit:
            self._give_up(f"{what} was over on day {day:.1f} only", day * self.day_seconds)

    def _give_up(self, what: str, seconds: float) -> None:
        if not self.is_exact and self.attempt < MAX_ATTEMPTS:
            needed = max(seconds * DAYS_PER_BOOT, 1.5 * self.day_seconds)
            raise TooSlow(what, float(math.ceil(needed)))
