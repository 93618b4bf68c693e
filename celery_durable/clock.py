"""The process's own clock: the only module that reads one.

It measures spans inside one process. Instants come from the database, whose clock all share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


class MachineClock:
    """The machine's monotonic clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wait(self, event: Waitable, seconds: float) -> bool:
        return event.wait(min(max(seconds, 0.0), threading.TIMEOUT_MAX))

    def pause(self, seconds: float) -> None:
        time.sleep(max(seconds, 0.0))


# The last one counts.
_clocks: list[Clock] = [MachineClock()]


class SystemClock:
    """The process's clock: the machine's, unless another one stands in for it."""

    def monotonic(self) -> float:
        return _clocks[-1].monotonic()

    def wait(self, event: Waitable, seconds: float) -> bool:
        return _clocks[-1].wait(event, seconds)

    def pause(self, seconds: float) -> None:
        _clocks[-1].pause(seconds)


def monotonic() -> float:
    """Seconds from an arbitrary origin, never going back."""
    return _clocks[-1].monotonic()


@contextmanager
def standing_in(clock: Clock) -> Iterator[None]:
    """Within this block the whole process goes by this clock: for tests that travel in time."""
    _clocks.append(clock)
    try:
        yield
    finally:
        _clocks.remove(clock)


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
