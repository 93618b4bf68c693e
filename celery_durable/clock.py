"""The process's own clock: the only module that reads one.

It measures spans inside one process. Instants come from the database, whose clock all share.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol


class Waitable(Protocol):
    """The part of ``threading.Event`` that a wait needs."""

    def wait(self, timeout: float | None = None) -> bool: ...


class Clock(Protocol):
    """What a loop or a lease needs of time; tests bring their own."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin, never going back."""
        ...

    def wait(self, event: Waitable, seconds: float) -> bool:
        """Wait until the event is set or the seconds are over. True: it is set."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait for so long."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def monotonic(self) -> float:
        return monotonic()

    def wait(self, event: Waitable, seconds: float) -> bool:
        return event.wait(min(max(seconds, 0.0), threading.TIMEOUT_MAX))

    def pause(self, seconds: float) -> None:
        time.sleep(max(seconds, 0.0))


def monotonic() -> float:
    """Seconds from an arbitrary origin, never going back."""
    return time.monotonic()


@dataclass(frozen=True, slots=True)
class HeardTime:
    """The database's time as it was told once, reckoned on from there by the process's own clock.

    Some time goes by between the question and the answer (monotonic instants both), and nobody knows when in
    it the database looked. So there are two answers: what begins now is to begin with ``at_most``, what ends
    now with ``at_least``, and nothing between them is ever early.
    """

    instant: datetime
    asked_at: float
    answered_at: float

    def at_most(self, now: float) -> datetime:
        """The latest that it can be at the monotonic instant ``now``."""
        return self.instant + timedelta(seconds=now - self.asked_at)

    def at_least(self, now: float) -> datetime:
        """The earliest that it can be."""
        return self.instant + timedelta(seconds=now - self.answered_at)

    def age(self, now: float) -> float:
        """Seconds since it was heard."""
        return now - self.answered_at

    @property
    def blur(self) -> float:
        """Seconds between the two answers."""
        return self.answered_at - self.asked_at
