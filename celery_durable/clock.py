"""The process's own clock: the only module that reads one.

It measures spans inside one process. Instants come from the database, whose clock all share.
"""

from __future__ import annotations

import threading
import time
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
