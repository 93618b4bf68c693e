"""The claim around Celery's tracer: before any signal, hook or state, and the settling after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from celery import states
from celery.exceptions import Reject, WorkerShutdown, WorkerTerminate

from celery_durable import metrics, settling, signals
from celery_durable.announcer import report_crash
from celery_durable.errors import ConfigurationError
from celery_durable.logs import about
from celery_durable.message import HEADER
from celery_durable.points import Point, reached
from celery_durable.records import Claim, Kind, OutcomeKind, Refusal, Scheduled, Status
from celery_durable.rules import TELLING_LIMIT, telling_delay
from celery_durable.run import TaskRun, claimed
from celery_durable.shield import at_work
from celery_durable.silence import quiet_tracer, silent

logger = logging.getLogger(__name__)

#: The key under which a request carries its delivery from the worker's main process to the tracer.
DELIVERY = "durable_delivery"

Tracer = Callable[..., Any]


def durable_tracer(task: Any) -> Tracer:
    """Celery's tracer for ``task``, run only under a claim."""
    worker = getattr(getattr(task.app, "durable", None), "worker", None)
    trace = quiet_tracer(task, getattr(worker, "node", None))

    def trace_durable(task_id: str, args: Any, kwargs: Any, request: dict[str, Any] | None = None) -> Any:
        request = dict(request or {})
        arrival = request.pop(DELIVERY, None)
        request.pop(HEADER, None)
        if arrival is None:
            raise ConfigurationError(
                f"task {task.name} is durable, but its worker does not know celery_durable: install it"
                " with Durable(app) before the worker starts"
            )
        # Celery would look for a stored SUCCESS of a redelivered message and skip what we have claimed.
        request["delivery_info"] = {**(request.get("delivery_info") or {}), "redelivered": False}
        with at_work():
            run = _claim(task, arrival)
            return silent() if run is None else _trace(run, trace, (task_id, args, kwargs, request))

    return trace_durable


def _claim(task: Any, arrival: Mapping[str, Any]) -> TaskRun | None:
    """Claim what arrived. None: there is nothing to run."""
    durable = task.app.durable
    delivery, number = arrival["delivery"], arrival["number"]
    runtime, limits = durable.runtime, durable.limits(task)
    durable.worker.enter_process()
    reached(Point.MESSAGE_ARRIVED)
    answer = durable.claims.claim(delivery, limits)
    if answer is None:
        durable.claims.put_back(number)
        return None
    if not isinstance(answer, Claim):
        durable.claims.decline(number)
        _log_declined(task, delivery, answer)
        return None
    run = TaskRun(
        task,
        answer,
        runtime,
        limits,
        asked_at=answer.asked_at,
        delivery=delivery,
        send=durable.send,
    )
    durable.worker.watch(run, number)
    if answer.outcome is not None and not _is_to_be_told(run, durable, number):
        return None
    durable.claims.accept(number, answer.key)
    metrics.claimed(task.name)
    _announce_start(run)
    return run


def _is_to_be_told(run: TaskRun, durable: Any, number: int) -> bool:
    """Whether the outcome that the claim found is one for the tracer to tell."""
    assert run.outcome is not None
    if run.outcome.kind in (OutcomeKind.CANCELLED, OutcomeKind.EXPIRED):
        # Celery tells of a revoke from the worker's main process, and so do we.
        durable.claims.revoke(number, run.claim.key, run.outcome)
        return False
    if run.outcome.kind == OutcomeKind.IGNORED:
        durable.claims.decline(number)
        settling.close_ignored(run)
        return False
    if run.claim.crashes >= TELLING_LIMIT:
        durable.claims.decline(number)
        settling.close_untold(run)
        return False
    return True


def _log_declined(task: Any, delivery: Any, answer: Refusal | Scheduled) -> None:
    fields = about(task.name, delivery.task_id)
    if isinstance(answer, Scheduled):
        logger.info("Task %s[%s] waits for its time as a row", task.name, delivery.task_id, extra=fields)
        return
    metrics.refused(task.name)
    level = logging.WARNING if answer.is_fresh_send else logging.INFO
    logger.log(
        level, "Message of %s[%s] dropped: %s", task.name, delivery.task_id, answer.reason, extra=fields
    )


def _announce_start(run: TaskRun) -> None:
    claim, sender = run.claim, run.task
    if claim.outcome is not None:
        if claim.recovered and claim.outcome.kind == OutcomeKind.QUARANTINED and claim.crashes == 0:
            # This claim itself has found the lease that ran out once too often.
            report_crash(sender, claim.key, claim.outcome, None)
        return
    if claim.recovered:
        signals.task_recovered.send(
            sender=sender, task_id=claim.key.task_id, token=claim.key.token, crashes=claim.crashes
        )
        return
    last = claim.journal[-1] if claim.journal else None
    if claim.found == Status.SLEEPING and last is not None and last.kind == Kind.SLEEP and last.is_over:
        assert last.due_at is not None
        metrics.woken(sender.name, (claim.claimed_at - last.due_at).total_seconds())
        signals.task_woken.send(
            sender=sender,
            task_id=claim.key.task_id,
            token=claim.key.token,
            name=last.name or None,
            due_at=last.due_at,
        )


def _trace(run: TaskRun, trace: Tracer, arguments: tuple[Any, ...]) -> Any:
    """Run the tracer under a heartbeat, then settle."""
    run.heartbeat.start()
    state: str | None = None
    try:
        with claimed(run):
            traced = trace(*arguments)
        state = states.SUCCESS if traced.info is None else traced.info.state
        run.asks_again = traced.info is not None and getattr(traced.info.retval, "requeue", False)
    except Reject as reject:
        # From a hook, or because the outcome could not be told: the row brings the task back by itself.
        # Left to Celery, the main process would store a failure for it.
        _log_return(run, reject)
        traced = silent()
    except (WorkerShutdown, WorkerTerminate):
        # Where tasks run in the main process, a signal handler ends the worker in the middle of one.
        settling.settle(run, None)
        raise
    except (SystemExit, KeyboardInterrupt) as death:
        settling.die(run, death)
        if run.task.app.durable.worker.has_child_processes:
            raise
        return silent()
    except BaseException as error:
        if isinstance(error, Exception):
            settling.settle(run, None)
        else:
            # The pool's own, such as a time limit of gevent: it says next what becomes of the task.
            run.heartbeat.stop()
        raise
    settling.settle(run, state)
    if state == states.RETRY:
        _let_go(traced.info.retval)
    return traced


def _log_return(run: TaskRun, reject: Any) -> None:
    who, fields = (run.task.name, run.lease.task_id), run.log_fields()
    if run.outcome is None:
        logger.warning("%s[%s] comes back: %r", *who, reject.reason, extra=fields)
        return
    text = "%s[%s] comes back in %g s: its outcome is journaled, but could not be told (%d times): %r"
    refusals = run.outcome.refusals
    logger.error(text, *who, telling_delay(refusals), refusals + 1, reject.reason, extra=fields)


def _let_go(error: BaseException | None) -> None:
    """Break the cycle of a retry's exception and the frames that it went through.

    billiard copies all code positions of a traceback, and in doing so wears out the young generations: what
    is left in a cycle would stay for hundreds of retries.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__context__
