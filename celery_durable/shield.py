"""Where a run may be interrupted: in its own body, and nowhere else.

An interrupt must never hit our transactions, Celery's tracer, or the next task of the same process or
thread. So whoever wants to interrupt a run asks here, and what cannot be delivered now is delivered when
the body is reached again, or never.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from celery_durable.errors import LeaseInterrupt

#: Raises its argument in the thread of the run; None withdraws what has not been raised yet.
AsyncRaise = Callable[[type[BaseException] | None], None]


class Shield:
    """The interruptible stretch of one run."""

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        self._lock = threading.RLock()
        self._in_body = False
        self._depth = 0
        self._pending: type[BaseException] | None = None
        self._async_raise: AsyncRaise | None = None

    @property
    def is_open(self) -> bool:
        """Whether an interrupt would hit the body right now."""
        return self._in_body and self._depth == 0

    @property
    def in_body(self) -> bool:
        """Whether the body is on, be it inside a durable call."""
        return self._in_body

    def request(self, error: type[BaseException]) -> bool:
        """Ask, from the run's own thread (a signal handler), to raise ``error``. True: raise it now."""
        if not self._in_body:
            return False
        if self._depth:
            self._pending = error
            return False
        return True

    def request_from_outside(self, error: type[BaseException], async_raise: AsyncRaise) -> bool:
        """Ask, from another thread, to raise ``error`` in the run's thread. False: the body is over."""
        with self._lock:
            if not self._in_body:
                return False
            if self._depth:
                self._pending = error
            else:
                self._async_raise = async_raise
                async_raise(error)
            return True

    @contextmanager
    def frozen(self) -> Iterator[bool]:
        """Whether the body is on, held: it cannot end while this block lasts."""
        with self._lock:
            yield self._in_body

    @contextmanager
    def body(self) -> Iterator[None]:
        """The stretch in which the body is on."""
        self._in_body = True
        try:
            yield
        finally:
            self._close()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """A stretch of ours inside the body. What was asked for meanwhile is raised at its end."""
        with self._lock:
            self._depth += 1
            self._withdraw()
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                pending = self._pending if self._depth == 0 and self._in_body else None
                if pending is not None:
                    self._pending = None
        if pending is not None:
            raise pending

    def _close(self) -> None:
        # An asynchronous exception may be raised in these very lines; after them none can come.
        while True:
            try:
                with self._lock:
                    self._in_body = False
                    self._pending = None
                    self._withdraw()
                return
            except LeaseInterrupt:
                continue

    def _withdraw(self) -> None:
        if self._async_raise is not None:
            self._async_raise(None)
            self._async_raise = None
