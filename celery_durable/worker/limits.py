"""Time limits. A soft one is delivered to the body of a durable task only, never into our own transactions.

A limit that passes while a claim is held, because the database is away, counts again from the start of the
body: the time was not the task's, but it is not to run without a limit either.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from billiard.pool import SIG_SOFT_TIMEOUT
from celery._state import get_current_task

from celery_durable.clock import monotonic
from celery_durable.run import TaskRun, claimed_run
from celery_durable.shield import work_began

logger = logging.getLogger(__name__)

_guard: _Guard | None = None


def guard_soft_limit() -> None:
    """Put a guard before billiard's handler of this pool process. Main thread only.

    billiard sets its own handler after the child's initializers have run, so this is done at a claim.
    """
    global _guard  # noqa: PLW0603 - one handler per process
    if SIG_SOFT_TIMEOUT is None:
        return
    if _guard is None or _guard.pid != os.getpid():
        _guard = _Guard(signal.getsignal(SIG_SOFT_TIMEOUT))
        signal.signal(SIG_SOFT_TIMEOUT, _guard)
    _guard.begin()


@contextmanager
def missed_limit_again() -> Iterator[None]:
    """Around a body: have a limit that passed before it pass again, as long after its start."""
    missed = None if _guard is None else _guard.missed
    if missed is None:
        yield
        return
    thread_id = threading.main_thread().ident or 0
    timer = threading.Timer(missed, signal.pthread_kill, (thread_id, SIG_SOFT_TIMEOUT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # What it has sent arrives before the next task, which may be a plain one.
        timer.join()


class _Guard:
    def __init__(self, inner: Any) -> None:
        self.pid = os.getpid()
        #: Seconds of a limit that has passed before the body began.
        self.missed: float | None = None
        self._inner = inner
        # The run that has had its limit: a worker that stops warmly sends it once more (billiard 4.3).
        self._told: TaskRun | None = None

    def begin(self) -> None:
        """Another run is about to be claimed."""
        self.missed = self._told = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        run = claimed_run()
        if run is not None and run is self._told:
            return
        if run is not None and run.shield.request(SoftTimeLimitExceeded):
            self._told = run
            raise SoftTimeLimitExceeded
        began = work_began()
        if began is None:
            # A plain task's; or nobody's, which comes late, and would end the process between two tasks.
            if get_current_task() is not None and callable(self._inner):
                self._inner(signum, frame)
        elif run is None or not run.entered:
            self.missed = monotonic() - began
        # Else it came after the body: it is not for our own statements.


def fails_at_limit(task: Any) -> bool:
    """Whether a hard time limit is a failure, and not a reason to run again."""
    # Celery before 5.7 has one option for failures and timeouts.
    own = getattr(task, "acks_on_timeout", None)
    return bool(task.acks_on_failure_or_timeout if own is None else own)
