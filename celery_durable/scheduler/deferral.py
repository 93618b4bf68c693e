"""Signals that would end the process have to wait until what was published is noted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Seconds for which a signal waits: a database or a broker that hangs must not make us immortal.
LONGEST = 2.0

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Deferral:
    """Holds SIGTERM and SIGINT back for the length of a block, in the main thread.

    Celery's beat answers a signal with ``close()``, in the midst of whatever runs, and an exception. Not
    ``pthread_sigmask``: another thread of the process would get the signal instead.
    """

    def __init__(self, longest: float = LONGEST) -> None:
        self._longest = longest
        self._original: dict[int, Any] = {}
        self._pending: tuple[int, FrameType | None] | None = None
        self._limit: threading.Timer | None = None

    def is_pending(self) -> bool:
        """Whether a signal is being held back."""
        return self._pending is not None

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """A block that such a signal waits for, but not longer than the longest time, and not twice."""
        if threading.current_thread() is not threading.main_thread() or self._original:
            yield
            return
        self._install()
        try:
            yield
        finally:
            self._restore()
            self._deliver()

    def _install(self) -> None:
        for number in _SIGNALS:
            # None: somebody has set it from outside Python, and only there can it be set back.
            if signal.getsignal(number) is not None:
                self._original[number] = signal.signal(number, self._hold)

    def _restore(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        for number, handler in self._original.items():
            signal.signal(number, handler)
        self._original = {}

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._pending is not None:
            self._restore()
            self._deliver()
            return
        self._pending = (number, frame)
        main = threading.main_thread().ident
        assert main is not None
        self._limit = threading.Timer(self._longest, signal.pthread_kill, (main, number))
        self._limit.daemon = True
        self._limit.start()

    def _deliver(self) -> None:
        if self._pending is None:
            return
        (number, frame), self._pending = self._pending, None
        handler = signal.getsignal(number)
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL:
            signal.raise_signal(number)
