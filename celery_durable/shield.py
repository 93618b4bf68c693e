"""Where a run may be interrupted: in its own body, and nowhere else.

An interrupt must never hit our transactions, Celery's tracer, or the next task of the same process or
thread. So whoever wants to interrupt a run asks here, and what cannot be delivered now is delivered when
the body is reached again, or never.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from celery_durable.clock import monotonic

#: Raises its argument in the thread of the run; None withdraws what has not been raised yet.
AsyncRaise = Callable[[type[BaseException] | None], None]

Value = TypeVar("Value")

_work_began: ContextVar[float | None] = ContextVar("celery_durable_work_began", default=None)


@contextmanager
def at_work() -> Iterator[None]:
    """The whole of our work on one delivery: its claim, its run, its settling."""
    token = _work_began.set(monotonic())
    try:
        yield
    finally:
        _work_began.reset(token)


def work_began() -> float | None:
    """The monotonic instant at which this thread began to work on a durable delivery. None: it does not."""
    return _work_began.get()


class Shield:
    """The interruptible stretch of one run."""

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        self._lock = threading.RLock()
        self._in_body = False
        self._depth = 0
        self._pending: type[BaseException] | None = None
        self._at_start: type[BaseException] | None = None
        self._async_raise: AsyncRaise | None = None
        # What was delivered: it may arrive a moment after the body's end, and is dropped then.
        self._delivered: tuple[type[BaseException], ...] = ()

    @property
    def in_body(self) -> bool:
        """Whether the body is on, be it inside a durable call."""
        return self._in_body

    def forestall(self, error: type[BaseException]) -> None:
        """Ask, from any thread, that ``error`` takes the place of a body that has not begun.

        Before ``request``: then either that finds the body on, or the body finds this at its start.
        """
        self._at_start = error

    def request(self, error: type[BaseException]) -> bool:
        """Ask, from the run's own thread (a signal handler), to raise ``error``. True: raise it now."""
        if not self._in_body:
            return False
        if self._depth:
            self._pending = error
            return False
        self._note(error)
        return True

    def request_from_outside(self, error: type[BaseException], async_raise: AsyncRaise) -> bool:
        """Ask, from another thread, to raise ``error`` in the run's thread. False: the body is not on."""
        with self._lock:
            if not self._in_body:
                return False
            if self._depth:
                self._pending = error
            else:
                self._note(error)
                self._async_raise = async_raise
                async_raise(error)
            return True

    @contextmanager
    def frozen(self) -> Iterator[bool]:
        """Whether the body is on, held: it cannot end while this block lasts."""
        with self._lock:
            yield self._in_body

    def run(self, body: Callable[[], Value]) -> Value:
        """Run the body: the one stretch in which an interrupt may be raised.

        An interrupt that comes when the body has ended already is dropped, and the body's own end stands.
        """
        # Python looks for signals and asynchronous exceptions at calls and jumps only: nothing between this
        # line and the next, or at the start of the ``finally``, can be interrupted.
        self._in_body = True
        try:
            if self._at_start is not None:
                raise self._at_start
            return body()
        finally:
            while True:
                try:
                    # A signal handler asks this in this very thread: from here on it raises nothing.
                    self._in_body = False
                    self._withdraw()
                    break
                except BaseException as error:
                    if not isinstance(error, self._delivered):
                        raise

    @contextmanager
    def closed(self) -> Iterator[None]:
        """A stretch of ours inside the body. What was asked for meanwhile is raised at its end."""
        with self._lock:
            # First this: until it is done an asynchronous exception may still be raised right here.
            self._postpone()
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                pending = self._pending if self._depth == 0 and self._in_body else None
                if pending is not None:
                    self._pending = None
                    self._note(pending)
            if pending is not None:
                # Also in place of an error of ours, which the body may handle: it would run on.
                raise pending

    def _note(self, error: type[BaseException]) -> None:
        if error not in self._delivered:
            self._delivered = (*self._delivered, error)

    def _postpone(self) -> None:
        """Turn what was sent from another thread, and may not have arrived, into what is pending."""
        if self._async_raise is not None:
            self._async_raise(None)
            self._async_raise = None
            self._pending = self._delivered[-1]

    def _withdraw(self) -> None:
        """Drop what is pending. Under the lock, after which another thread sends nothing any more."""
        with self._lock:
            self._postpone()
            self._pending = None
