"""Soft time limits: delivered to the body of a durable task only, never into our own transactions."""

from __future__ import annotations

import logging
import os
import signal
from types import FrameType
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from billiard.pool import SIG_SOFT_TIMEOUT

from celery_durable.run import claimed_run
from celery_durable.shield import is_at_work

logger = logging.getLogger(__name__)

_guarded_pid = 0


def guard_soft_limit() -> None:
    """Put a guard before billiard's handler of this pool process. Main thread only.

    billiard sets its own handler after the child's initializers have run, so this is done at a claim.
    """
    global _guarded_pid  # noqa: PLW0603 - one handler per process
    if _guarded_pid == os.getpid() or SIG_SOFT_TIMEOUT is None:
        return
    inner = signal.getsignal(SIG_SOFT_TIMEOUT)
    signal.signal(SIG_SOFT_TIMEOUT, _Guard(inner))
    _guarded_pid = os.getpid()


class _Guard:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        run = claimed_run()
        if run is not None and run.shield.request(SoftTimeLimitExceeded):
            raise SoftTimeLimitExceeded
        if not is_at_work() and callable(self._inner):
            # A plain task's.
            self._inner(signum, frame)
        # Else it came while the claim was under way, or after the body: it is not for our own statements.
