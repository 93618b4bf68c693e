"""Signals that would end the process do not strike at any instruction: they wait for a good place.

Celery's beat answers a signal with ``close()``, in the midst of whatever runs, and an exception. Between a
publish and the note of it that would send a message twice; in a finalizer the exception would be lost, and
the signal with it; and psycopg answers ``SystemExit`` by asking a server that hangs, for ten seconds, to
cancel the query. So a signal is noted first. It is delivered at the end of the block; or, where the block
does not end in time, after it was left by an exception of our own.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Seconds for which a signal waits: not at all where nothing but time passes; for the end of a statement;
#: and, where messages are sent and not noted yet, for their note. A database or a broker that hangs must
#: not make us immortal.
AT_ONCE = 0.0
SOON = 0.5
NOTED = 2.0

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
    """A signal came and the block did not end in time, or is at a good place to be left."""


class Deferral:
    """Holds SIGTERM and SIGINT back for the length of a block, in the main thread.

    Not ``pthread_sigmask``: another thread of the process would get the signal instead.
    """

    def __init__(self) -> None:
        self._patience = AT_ONCE
        self._is_inside = False
        self._original: dict[int, Any] = {}
        self._pending: tuple[int, FrameType | None] | None = None
        self._limit: threading.Timer | None = None

    def is_pending(self) -> bool:
        """Whether a signal is being held back."""
        return self._pending is not None

    @contextmanager
    def holding(self, patience: float) -> Iterator[None]:
        """A block that a signal waits for, for so many seconds at most, and not twice.

        Within such a block another one has a patience of its own, and at its end the outer one is left if
        a signal is pending.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        hold = self._hold_within if self._is_inside else self._hold_outermost
        with hold(patience):
            yield

    @contextmanager
    def _hold_outermost(self, patience: float) -> Iterator[None]:
        try:
            self._install()
            self._is_inside = True
            # It may have come meanwhile.
            self._wait_for(patience)
            yield
        except Interrupted:
            pass
        finally:
            self._is_inside = False
            self._restore()
            self._deliver()

    @contextmanager
    def _hold_within(self, patience: float) -> Iterator[None]:
        before = self._patience
        self._wait_for(patience)
        try:
            yield
        finally:
            self._wait_for(before)
        if self._pending is not None:
            raise Interrupted

    def _install(self) -> None:
        for number in _SIGNALS:
            # None: somebody has set it from outside Python, and only there can it be set back.
            if signal.getsignal(number) is not None:
                self._original[number] = signal.signal(number, self._note)

    def _restore(self) -> None:
        self._set_limit(None)
        for number, handler in self._original.items():
            signal.signal(number, handler)
        self._original = {}

    def _wait_for(self, patience: float) -> None:
        self._patience = patience
        if self._pending is not None:
            self._set_limit(self._pending[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first = self._pending is None
        if is_first:
            self._pending = (number, frame)
        if not self._is_inside:
            # The block delivers it at its end, which is near, or has yet to begin.
            return
        if not is_first or not self._patience:
            raise Interrupted
        self._set_limit(number)

    def _set_limit(self, number: int | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        if number is None:
            return
        main = threading.main_thread().ident
        assert main is not None
        self._limit = threading.Timer(self._patience, signal.pthread_kill, (main, number))
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
