"""Settling: when Celery's tracer is done with a run, its row is made to say what has been told."""

from __future__ import annotations

import logging
import signal

from celery import states

from celery_durable.announcer import report_crash
from celery_durable.errors import LeaseLost, LeaseRenewalTimedOut, StoreUnavailable
from celery_durable.points import Point, reached
from celery_durable.records import OutcomeKind, Status
from celery_durable.rules import telling_delay
from celery_durable.run import TaskRun

logger = logging.getLogger(__name__)

#: Seconds before a body that asked for it gets its next try.
AGAIN = 1.0
#: The exit code by which billiard ends a pool process that gets a SIGTERM (a signal to the whole process
#: group of a worker, say).
_TERMINATED = -(256 - signal.SIGTERM)

_STATUS_OF_OUTCOME = {
    OutcomeKind.VALUE: Status.SUCCEEDED,
    OutcomeKind.EXCEPTION: Status.FAILED,
    OutcomeKind.CANCELLED: Status.CANCELLED,
    OutcomeKind.EXPIRED: Status.CANCELLED,
    OutcomeKind.QUARANTINED: Status.QUARANTINED,
    OutcomeKind.IGNORED: Status.SUCCEEDED,
}


def settle(run: TaskRun, state: str | None) -> None:
    """Settle a run that left the tracer in this state; None: by an exception. Raises nothing."""
    try:
        _settle(run, state)
    except (StoreUnavailable, LeaseLost) as error:
        logger.warning(
            "%s[%s] is not settled, its lease will run out: %s",
            run.task.name,
            run.lease.task_id,
            error,
            extra=run.log_fields(),
        )
    finally:
        run.dispose()


def _settle(run: TaskRun, state: str | None) -> None:
    execution = run.execution
    if run.is_closed or execution.is_parked or execution.divergence is not None:
        return
    if run.lease.lost:
        _let_go(run)
    elif run.replaced:
        _finish(run, Status.REPLACED)
    elif state == states.RETRY and run.retry is not None:
        _park_retry(run)
    elif run.outcome is not None and run.told:
        _finish(run, _STATUS_OF_OUTCOME[run.outcome.kind])
    elif not run.entered and state == states.FAILURE and run.told:
        # It failed before its body began (a hook raised), and Celery has told so.
        _finish(run, Status.FAILED)
    elif not run.entered and state == states.SUCCESS and run.told:
        # Celery has told it, with all that follows: to run it again would be to tell it again.
        logger.error(
            "%s[%s] ran past its run: something in the place of its __call__ did not call it",
            run.task.name,
            run.lease.task_id,
            extra=run.log_fields(),
        )
        _finish(run, Status.SUCCEEDED)
    elif not run.entered and state in (states.IGNORED, states.REJECTED) and not run.asks_again:
        _finish(run, Status.SUCCEEDED)
    else:
        _hand_back(run)


def close_untold(run: TaskRun) -> None:
    """Telling this outcome has killed several workers: store the bare state and leave it at that."""
    assert run.outcome is not None
    logger.error(
        "%s[%s]: its outcome could not be told, %d workers died of it; only its state is stored",
        run.task.name,
        run.lease.task_id,
        run.claim.crashes,
        extra=run.log_fields(),
    )
    run.announcer.store_outcome(run.outcome)
    reached(Point.UNTOLD_STORED)
    _finish(run, _STATUS_OF_OUTCOME[run.outcome.kind])


def close_ignored(run: TaskRun) -> None:
    """The body had asked for silence, and the process died before the row was ended."""
    _finish(run, Status.SUCCEEDED)


def die(run: TaskRun, cause: BaseException) -> None:
    """The process of a run is going down, and that is known at once.

    A crash like any other where the body asked for it; none where somebody else did, by a signal.
    """
    run.heartbeat.stop()
    leases = run.runtime.store.leases
    try:
        if isinstance(cause, SystemExit) and cause.code == _TERMINATED:
            leases.hand_back(run.claim.key)
        else:
            report_crash(
                run.task, run.claim.key, leases.recover(run.claim.key, run.limits.max_crashes), cause
            )
    except StoreUnavailable as error:
        logger.warning(
            "%s[%s] waits for its lease to run out: %s",
            run.task.name,
            run.lease.task_id,
            error,
            extra=run.log_fields(),
        )
    finally:
        run.dispose()


def _finish(run: TaskRun, status: str) -> None:
    run.lease.close()
    reached(Point.OUTCOME_TOLD)
    run.persevered(lambda: run.runtime.store.runs.finish(run.claim.key, status))
    reached(Point.ROW_ENDED)


def _hand_back(run: TaskRun) -> None:
    """The outcome could not be told, or the body wants to run again: soon, and it is no crash."""
    run.lease.close()
    run.persevered(lambda: _give_back(run))
    reached(Point.RUN_HANDED_BACK)


def _give_back(run: TaskRun) -> bool:
    leases = run.runtime.store.leases
    if run.outcome is None:
        return leases.hand_back(run.claim.key, AGAIN)
    return leases.tell_later(run.claim.key, run.outcome, telling_delay(run.outcome.refusals))


def _let_go(run: TaskRun) -> None:
    leases = run.runtime.store.leases
    if run.announcer.taker is None and not isinstance(run.lease.loss, LeaseRenewalTimedOut):
        run.announcer.taker = leases.lost_to(run.claim.key)
    run.tell_stopped()
    # If it ran out unseen and nobody has taken it, the next one need not wait for its expiry.
    leases.hand_back(run.claim.key)


def _park_retry(run: TaskRun) -> None:
    assert run.retry is not None
    captured, due, restart = run.retry
    run.lease.close()
    reached(Point.RETRY_STORED)
    due_at = run.execution.persevere(
        lambda: run.runtime.store.runs.park(
            run.claim.key, due, status=Status.RETRYING, message=captured.message, restart=restart
        )
    )
    reached(Point.RETRY_PARKED)
    if due_at is None:
        run.announcer.refused()
    else:
        run.execution.is_parked = True
