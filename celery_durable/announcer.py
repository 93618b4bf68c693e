"""What the world hears of a run besides its end: result states, signals, events, log lines."""

from __future__ import annotations

import logging
import threading
from datetime import datetime, timedelta
from typing import Any

from celery import Task, states
from celery import signals as celery_signals

from celery_durable import signals
from celery_durable.errors import ReplayDivergence, StoreUnavailable, TaskQuarantined
from celery_durable.events import send_task_event
from celery_durable.lease import Lease
from celery_durable.logs import about
from celery_durable.records import LeaseKey, Outcome, OutcomeKind
from celery_durable.runtime import Runtime

logger = logging.getLogger(__name__)

#: States in the result store while a task is parked, and while it is set aside; none is a ready state.
SLEEPING = "SLEEPING"
QUARANTINED = "QUARANTINED"

#: Seconds for which what comes after a lost lease waits for the receivers of that signal.
FIRST_WORD_TIME = 0.5


class Announcer:
    """Speaks for one run. ``request`` is Celery's, set when the tracer has made it."""

    def __init__(self, task: Any, lease: Lease, runtime: Runtime) -> None:
        self.request: Any = None
        #: The outcome by which the lease was taken, where it is known.
        self.taker: Outcome | None = None
        self._task = task
        self._lease = lease
        self._runtime = runtime
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._telling: threading.Thread | None = None

    @property
    def stores_result(self) -> bool:
        """Whether results of this run are stored at all."""
        return not ignores_result(self._task, self.request)

    @property
    def has_audience(self) -> bool:
        """Whether anybody would have to be told, after a crash too, that the run has succeeded."""
        task = self._task
        return bool(
            self.stores_result
            or self.request.chord
            or celery_signals.task_success.receivers
            or any(_is_overridden(task, hook) for hook in ("on_success", "after_return"))
        )

    # -- sleeping --------------------------------------------------------------------------------

    def going_to_sleep(self, due_at: datetime, name: str, timer: str) -> None:
        """Store SLEEPING: ``get()`` waits on."""
        meta = {"due_at": due_at.isoformat(), "name": name or None, "timer_id": timer}
        self._store_state(SLEEPING, meta)

    def parked(self, due_at: datetime, name: str, now: datetime) -> None:
        """Tell of a sleep that has been written."""
        until = due_at.isoformat()
        self._log(logging.INFO, "sleeps until %s", until)
        self._warn_of_expiry(due_at - now)
        signals.task_parked.send(
            sender=self._task,
            task_id=self._lease.task_id,
            token=self._lease.token,
            name=name or None,
            due_at=due_at,
        )
        send_task_event(self._task, "task-sleeping", self._lease.task_id, due_at=until, name=name or None)

    def _warn_of_expiry(self, wait: timedelta) -> None:
        """Results of a group and counters of a chord expire in the result store while one member sleeps."""
        expires = self._task.app.conf.result_expires
        if not expires or not (self.request.chord or self.request.group):
            return
        limit = expires if isinstance(expires, timedelta) else timedelta(seconds=float(expires))
        if wait > limit:
            self._log(
                logging.WARNING,
                "sleeps longer than result_expires (%s) inside a group or chord: what the others returned may"
                " be gone when it wakes",
                limit,
            )

    # -- losing ----------------------------------------------------------------------------------

    def lost(self) -> None:
        """The lease is lost: said once, by the heartbeat or by the run, whoever finds it first."""
        if not self._is_first("lost"):
            return
        reason = self._lease.loss.reason if self._lease.loss is not None else ""
        self._log(logging.WARNING, "lost its lease: %s", reason)
        signals.lease_lost.send(
            sender=self._task, task_id=self._lease.task_id, token=self._lease.token, reason=reason
        )

    def lost_meanwhile(self) -> None:
        """As ``lost``, in a thread of its own: a receiver may hang, and the body has to be interrupted."""
        name = f"durable-telling-{self._lease.task_id}"
        telling = threading.Thread(target=self.lost, name=name, daemon=True)
        try:
            telling.start()
        except RuntimeError:
            # None can be had. The run tells it itself when it has stopped.
            return
        self._telling = telling

    def let_speak(self) -> None:
        """Wait for those who are being told of the loss, for a moment: they come first."""
        if self._telling is not None:
            self._telling.join(FIRST_WORD_TIME)

    def stopped(self) -> None:
        """The run was taken from its worker: ``task_revoked``, once, as for any task that is stopped.

        Never ``REVOKED`` in the result store: the task goes on elsewhere. Of a cancel tells the worker that
        delivers it.
        """
        if not self._is_first("stopped"):
            return
        if self.taker is not None and self.taker.kind == OutcomeKind.CANCELLED:
            return
        celery_signals.task_revoked.send(
            sender=self._task, request=self.request, terminated=True, signum=None, expired=False
        )
        fields = {"terminated": True, "signum": None, "expired": False}
        send_task_event(self._task, "task-revoked", self._lease.task_id, **fields)

    def set_aside(self, divergence: ReplayDivergence) -> None:
        """The code does not fit the journal: the task waits until somebody releases it."""
        fields = about(self._task.name, self._lease.task_id, self._lease.token)
        logger.error("%s", divergence, extra={**fields, "position": divergence.position})
        signals.task_quarantined.send(
            sender=self._task,
            task_id=self._lease.task_id,
            token=self._lease.token,
            reason=str(divergence),
        )

    def going_aside(self, divergence: ReplayDivergence) -> None:
        """Store QUARANTINED, no ready state: a bad deploy must not kill what has slept for a month."""
        self._store_state(QUARANTINED, {"reason": str(divergence)})

    def refused(self) -> None:
        """A write was refused: SLEEPING may have landed on the final state. Store that again."""
        try:
            outcome = self._runtime.store.leases.lost_to(self._lease.key)
        except StoreUnavailable:
            return
        self.taker = outcome
        if outcome is None:
            return
        try:
            self.store_outcome(outcome)
        except Exception as error:  # noqa: BLE001 - out of here it would be told as the failure of a lost run
            self._log(logging.WARNING, "has an outcome that could not be stored again: %s", error)

    def store_outcome(self, outcome: Outcome) -> None:
        """Store the state and result of an outcome, and tell nobody else."""
        if not self.stores_result:
            return
        backend, task_id = self._task.backend, self._lease.task_id
        codec = self._runtime.outcome_codec
        stored = (outcome.payload, outcome.content_type, outcome.content_encoding)
        state: str = states.FAILURE
        if outcome.kind == OutcomeKind.VALUE:
            state, result = states.SUCCESS, codec.decode(*stored)
        elif outcome.kind == OutcomeKind.EXCEPTION:
            result = codec.decode_exception(*stored)
        elif outcome.kind == OutcomeKind.QUARANTINED:
            result = TaskQuarantined(task_id, outcome.reason or "")
        elif outcome.kind in (OutcomeKind.CANCELLED, OutcomeKind.EXPIRED):
            reason = "expired" if outcome.kind == OutcomeKind.EXPIRED else "revoked"
            backend.mark_as_revoked(task_id, reason, request=None, store_result=True)
            return
        else:
            return
        backend.store_result(task_id, result, state, request=self.request)

    # -- how -------------------------------------------------------------------------------------

    def _store_state(self, state: str, meta: dict[str, Any]) -> None:
        if not self.stores_result:
            return
        try:
            self._task.backend.store_result(self._lease.task_id, meta, state, request=self.request)
        except Exception as error:  # noqa: BLE001 - a result store that is away must not keep a task awake
            self._log(logging.WARNING, "has state %s, which could not be stored: %s", state, error)

    def _is_first(self, what: str) -> bool:
        with self._lock:
            is_first = what not in self._said
            self._said.add(what)
        return is_first

    def _log(self, level: int, text: str, *values: Any) -> None:
        logger.log(
            level,
            "Task %s[%s] " + text,  # noqa: G003 - the text is one of ours
            self._task.name,
            self._lease.task_id,
            *values,
            extra=about(self._task.name, self._lease.task_id, self._lease.token),
        )


def report_crash(task: Any, key: LeaseKey, answer: Outcome | bool, cause: BaseException | None) -> None:
    """Tell of a run whose process is gone, with what the store made of it (``Leases.recover``)."""
    fields = about(task.name, key.task_id, key.token)
    if isinstance(answer, Outcome):
        logger.error("Task %s[%s] is quarantined: %s", task.name, key.task_id, answer.reason, extra=fields)
        signals.task_quarantined.send(sender=task, task_id=key.task_id, token=key.token, reason=answer.reason)
    elif answer:
        logger.warning(
            "Task %s[%s] lost its process (%r) and goes on elsewhere",
            task.name,
            key.task_id,
            cause,
            extra=fields,
        )


def _is_overridden(task: Any, hook: str) -> bool:
    """Whether a task has a hook of its own, be it by its class or by ``task_annotations``."""
    return getattr(getattr(task, hook), "__func__", None) is not getattr(Task, hook)


def ignores_result(task: Any, request: Any) -> bool:
    """Whether nobody stores a result of this task (the request overrides the task)."""
    # Context has a class-level default, so only an instance's own value counts (as in Celery 5.7).
    own = request.__dict__.get("ignore_result") if request is not None else None
    return bool(task.ignore_result if own is None else own)
