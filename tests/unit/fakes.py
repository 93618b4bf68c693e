"""A clock that tests move, and waits that end when it has moved far enough."""

from __future__ import annotations

import threading
import time


class FakeClock:
    """Time that stands still until it is moved.

    A wait ends when its event is set or the clock has been moved past its end; `waiting` says how many
    threads are in one.
    """

    def __init__(self, now: float = 1_000.0) -> None:
        self._now = now
        self._moved = threading.Condition()
        self.waiting = 0

    def monotonic(self) -> float:
        return self._now

    def move(self, seconds: float) -> None:
        """Let time pass, and those who wait see that it has."""
        with self._moved:
            self._now += seconds
            self._moved.notify_all()

    def move_to(self, instant: float) -> None:
        self.move(instant - self._now)

    def wait(self, event: object, seconds: float) -> bool:
        until = self._now + seconds
        with self._moved:
            self.waiting += 1
            try:
                while not event.is_set() and self._now < until:  # type: ignore[attr-defined]
                    # An event cannot notify this condition, so look now and then.
                    self._moved.wait(0.001)
            finally:
                self.waiting -= 1
        return bool(event.is_set())  # type: ignore[attr-defined]

    def pause(self, seconds: float) -> None:
        self.wait(threading.Event(), seconds)


class StillClock:
    """For code of one thread: a wait takes no time and moves the clock by what it asked for."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def wait(self, event: threading.Event, seconds: float) -> bool:
        if event.is_set():
            return True
        self.waits.append(seconds)
        self.now += seconds
        return event.is_set()

    def pause(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def eventually(condition, timeout: float = 5.0) -> None:
    """Wait until the condition holds; threads of the test are to bring it about at once."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.001)
