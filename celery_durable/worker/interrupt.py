"""Interrupting a run that lost its lease, as far as each pool allows.

| pool | running Python code | a blocked call | after the grace |
| --- | --- | --- | --- |
| prefork | at once | ends | the process kills itself |
| solo | at once | ends | reported as a runaway |
| threads | at once | when it returns | reported as a runaway |
| gevent | when it next switches | ends | reported as a runaway |
| eventlet | not at all | when it returns | reported as a runaway |

A C call that holds the interpreter's lock is interrupted when it returns. Until then the fence holds.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Protocol

from celery_durable.errors import LeaseInterrupt
from celery_durable.logs import about
from celery_durable.records import Outcome, OutcomeKind
from celery_durable.shield import Shield

logger = logging.getLogger(__name__)

#: Seconds between two tries to interrupt the same run: a ``finally`` or a bare ``except`` may go on.
AGAIN = 1.0
#: Seconds to wait for what is told of a run before its process kills itself.
TELLING_TIME = 1.0
#: Seconds between two reports of a run that cannot be stopped.
REPORT_EVERY = 60.0
#: Ignored by default, used by neither Celery nor Python. None on a system that has none such.
INTERRUPT_SIGNAL: int | None = getattr(signal, "SIGURG", None)


class Interruptible(Protocol):
    """What an interrupter needs of a run."""

    task: Any
    lease: Any
    limits: Any
    over: threading.Event
    #: The greenlet of the run, where the pool has greenlets.
    greenlet: Any

    @property
    def shield(self) -> Shield: ...

    def tell_stopped(self) -> None:
        """Tell of a run that is taken from its worker; only once, whoever is the first."""


#: Tries once to interrupt a run. False: its body is not on.
Deliver = Callable[[Interruptible], bool]


class Interrupter:
    """Stops the body of a run whose lease is lost. Called in the run's heartbeat thread.

    ``can_kill``: the process runs nothing else (a prefork child).
    """

    def __init__(self, deliver: Deliver, *, can_kill: bool) -> None:
        self._deliver = deliver
        self._can_kill = can_kill

    def __call__(self, run: Interruptible, outcome: Outcome | None) -> None:
        """Interrupt until the run is over, or the grace is."""
        if outcome is not None and outcome.kind == OutcomeKind.CANCELLED:
            # A cancel without terminate: the run ends at its next durable call, like Celery's revoke.
            return
        # Hooks and signal receivers come before the body, and are not interrupted.
        run.shield.forestall(LeaseInterrupt)
        left = run.limits.revoke_grace
        # Once at least, also with a grace of 0.
        while self._deliver(run):
            if run.over.wait(min(AGAIN, left)):
                return
            left -= AGAIN
            if left <= 0:
                break
        else:
            return
        if self._can_kill:
            self._kill(run)
        else:
            self._report_until_over(run)

    def _kill(self, run: Interruptible) -> None:
        if not run.shield.in_body:
            return
        # A broker that hangs must not keep alive what the kill is for.
        telling = threading.Thread(target=run.tell_stopped, name="durable-telling", daemon=True)
        telling.start()
        telling.join(TELLING_TIME)
        with run.shield.frozen() as in_body:
            # Held by the lock: the process cannot have gone on to its next task meanwhile.
            if in_body:
                logger.error(
                    "%s[%s] did not stop within %g s of losing its lease: its process kills itself",
                    run.task.name,
                    run.lease.task_id,
                    run.limits.revoke_grace,
                    extra=about(run.task.name, run.lease.task_id, run.lease.token),
                )
                os.kill(os.getpid(), signal.SIGKILL)

    def _report_until_over(self, run: Interruptible) -> None:
        while not run.over.is_set():
            logger.error(
                "%s[%s] is a runaway: it lost its lease and cannot be stopped here. Nothing it writes counts",
                run.task.name,
                run.lease.task_id,
                extra=about(run.task.name, run.lease.task_id, run.lease.token),
            )
            if run.over.wait(REPORT_EVERY) or not self._deliver(run):
                return


class SignalDelivery:
    """Prefork and solo: the task runs in the main thread, and a signal ends even a blocked call.

    Not so where a whole worker runs in another thread, as Celery's own for tests does: there it is
    interrupted as in a pool of threads.
    """

    def __init__(self) -> None:
        self._target: Interruptible | None = None
        self._pid = 0

    def install(self) -> None:
        """Set the handler; called in the thread that runs tasks."""
        if self._pid != os.getpid() and INTERRUPT_SIGNAL is not None and _is_main(threading.get_ident()):
            signal.signal(INTERRUPT_SIGNAL, self._handle)
            self._pid = os.getpid()

    def __call__(self, run: Interruptible) -> bool:
        if INTERRUPT_SIGNAL is None:
            return deliver_to_nobody(run)
        if not _is_main(run.shield.thread_id):
            return deliver_to_thread(run)
        if not run.shield.in_body:
            return False
        self._target = run
        signal.pthread_kill(run.shield.thread_id, INTERRUPT_SIGNAL)
        return True

    def _handle(self, signum: int, frame: Any) -> None:
        run, self._target = self._target, None
        # Asked here, in the run's own thread: what the shield says now holds until we return.
        if run is not None and run.shield.request(LeaseInterrupt):
            raise LeaseInterrupt


def _is_main(thread_id: int) -> bool:
    return thread_id == threading.main_thread().ident


class _Withdrawn(BaseException):
    """Takes the place of an asynchronous exception that is not to be raised any more."""


def deliver_to_thread(run: Interruptible) -> bool:
    """Threads: an exception that the interpreter raises in another thread, between two bytecodes."""
    thread_id = run.shield.thread_id

    def async_raise(error: type[BaseException] | None) -> None:
        if error is None:
            _withdraw(thread_id)
        else:
            _send(thread_id, error)

    return run.shield.request_from_outside(LeaseInterrupt, async_raise)


def _send(thread_id: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(error))


def _withdraw(thread_id: int) -> None:
    # Sending NULL would do, but CPython 3.11 goes on to think that something has to be raised, and then
    # hangs under any profiler. So another one takes its place, and is received here.
    try:
        _send(thread_id, _Withdrawn)
        while True:
            pass
    except _Withdrawn:
        pass


def deliver_to_greenlet(run: Interruptible) -> bool:
    """gevent: thrown into the greenlet from the hub, where the body cannot have moved on meanwhile."""
    import gevent  # noqa: PLC0415 - only where the worker runs on it

    if not run.shield.in_body:
        return False

    def throw() -> None:
        if run.shield.request(LeaseInterrupt):
            run.greenlet.throw(LeaseInterrupt)

    gevent.get_hub().loop.run_callback(throw)
    return True


def deliver_to_nobody(run: Interruptible) -> bool:
    """A pool that cannot be interrupted: the guard and the fence hold."""
    return run.shield.in_body
