"""What a run writes: steps, sleeps, its end. Each is one short transaction with one fenced statement."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Boolean, ColumnElement, bindparam, case, select, update

from celery_durable.records import (
    Due,
    Ended,
    Follower,
    JournalEntry,
    LeaseKey,
    Message,
    Outcome,
    Status,
)
from celery_durable.store.base import (
    Context,
    due_values,
    given,
    lease_values,
    message_given,
    message_values,
    most_seconds,
    outcome_to_text,
    seconds_given,
)
from celery_durable.store.changes import Change, FencedChange
from celery_durable.store.claims import Claims
from celery_durable.store.dialect import unhurried_commit
from celery_durable.store.journal import JournalRows
from celery_durable.store.outbox import begin_all
from celery_durable.store.prepared import Prepared

#: What an execution is without that nobody owns.
_UNOWNED = {"owner": None, "sends": 0, "draining": False}


class Runs:
    """Statements of the holder of a lease. Their answers tell whether it still was the holder."""

    def __init__(self, context: Context, claims: Claims) -> None:
        self._context = context
        self._claims = claims
        self._executions = context.schema.executions
        journal = JournalRows(context)
        self._progress = FencedChange(context, journal, _progress)
        self._parking = FencedChange(context, journal, self._parked)
        self._retrying = FencedChange(context, journal, self._retried)
        self._ending = FencedChange(context, journal, self._ended)
        self._closing = FencedChange(context, journal, self._closed)
        self._setting_aside = FencedChange(context, journal, _set_aside)
        self._finishing = Prepared(context, self._finish)

    def record(self, key: LeaseKey, entries: Sequence[JournalEntry]) -> bool:
        """Journal the steps of a run. False: the lease is not ours any more, nothing was written."""
        return self._progress.apply(key, {}, entries) is not None

    def record_sleep(self, key: LeaseKey, entries: Sequence[JournalEntry], due: Due) -> datetime | None:
        """Journal a sleep that is slept in place (the last of ``entries``).

        Returns its due time, or None: refused.
        """
        due_at = due.at or self._settled(due)
        change = self._progress.apply(key, {}, entries, due_at)
        return None if change is None else due_at

    def park(
        self,
        key: LeaseKey,
        due: Due,
        *,
        status: str = Status.SLEEPING,
        entries: Sequence[JournalEntry] = (),
        message: Message | None = None,
        restart: bool = False,
    ) -> datetime | None:
        """Give the execution up until it is due, journaling ``entries`` (the sleep last).

        ``message`` replaces the one to be sent (a retry), ``restart`` empties the journal.
        Returns the due time, or None: refused.
        """
        context = self._context
        values = {"the_status": status, "has_progress": bool(entries), **due_values(due)}
        if message is None and not restart:
            change = self._parking.apply(key, values, entries)
        else:
            change = self._park_anew(key, values, entries, message, restart=restart)
        if change is None:
            return self._parked_before(key, status, due)
        assert change.wake_at is not None
        context.nearer(Due(seconds=(change.wake_at - change.now).total_seconds()))
        return change.wake_at

    def _park_anew(
        self,
        key: LeaseKey,
        values: dict[str, Any],
        entries: Sequence[JournalEntry],
        message: Message | None,
        *,
        restart: bool,
    ) -> Change | None:
        parking = self._parking
        if message is not None:
            parking, values = self._retrying, {**values, **message_values(message)}
        with self._context.database.transaction() as connection:
            return parking.apply_within(connection, key, values, entries, restart=restart)

    def _parked_before(self, key: LeaseKey, status: str, due: Due) -> datetime | None:
        """The due time, if an earlier try was accepted and its answer lost on the way.

        Nobody but its holder parks an execution, and every claim changes the token.
        """
        executions = self._executions
        with self._context.database.statements() as connection:
            wake_at: datetime | None = connection.execute(
                select(executions.c.wake_at).where(
                    self._context.mine(executions, key.task_id),
                    executions.c.token == key.token,
                    executions.c.owner.is_(None),
                    executions.c.status == status,
                    executions.c.outcome.is_(None),
                )
            ).scalar()
        return None if wake_at is None else due.at or wake_at

    def end(
        self,
        key: LeaseKey,
        outcome: Outcome,
        ttl: float,
        *,
        entries: Sequence[JournalEntry] = (),
        followers: Sequence[Follower] = (),
    ) -> Ended | None:
        """Journal how the run came to its end, with those who come after it, in one transaction.

        From here on the outcome is fixed: what may die is told again from the row. None: refused.
        """
        values = {"the_outcome": outcome_to_text(outcome), "ttl": most_seconds(ttl)}
        ended = self._conclude(self._ending, key, values, entries, followers)
        # The answer to an earlier try may have been lost on its way: then the outcome is there.
        return Ended((), ()) if ended is None and self._has_outcome(key) else ended

    def close(
        self,
        key: LeaseKey,
        outcome: Outcome,
        *,
        entries: Sequence[JournalEntry] = (),
        followers: Sequence[Follower] = (),
    ) -> Ended | None:
        """``end`` and ``finish`` of a success in one write, for a run of which nobody is to be told."""
        values = {"the_outcome": outcome_to_text(outcome), "the_status": Status.SUCCEEDED}
        ended = self._conclude(self._closing, key, values, entries, followers)
        return Ended((), ()) if ended is None and self._is_closed(key) else ended

    def _conclude(
        self,
        change: FencedChange,
        key: LeaseKey,
        values: dict[str, Any],
        entries: Sequence[JournalEntry],
        followers: Sequence[Follower],
    ) -> Ended | None:
        if not followers:
            return None if change.apply(key, values, entries) is None else Ended((), ())
        ended: Ended | None = None
        with self._context.database.transaction() as connection:
            changed = change.apply_within(connection, key, values, entries)
            if changed is not None:
                ended = begin_all(connection, self._context, self._claims, followers, changed.now)
        for follower in followers:
            if ended is not None and follower.due is not None:
                self._context.nearer(follower.due)
        return ended

    def _has_outcome(self, key: LeaseKey) -> bool:
        """Whether our own run has written its outcome: a verdict from outside takes the owner away."""
        outcome = self._executions.c.outcome
        return self._is_there(self._context.fenced(key), outcome.is_not(None))

    def _is_closed(self, key: LeaseKey) -> bool:
        """Whether our own run has closed the execution: nobody else makes a success of this token."""
        columns = self._executions.c
        return self._is_there(
            self._context.mine(self._executions, key.task_id),
            columns.token == key.token,
            columns.owner.is_(None),
            columns.status == Status.SUCCEEDED,
        )

    def _is_there(self, *conditions: ColumnElement[bool]) -> bool:
        with self._context.database.statements() as connection:
            return connection.execute(select(1).where(*conditions)).first() is not None

    def finish(self, key: LeaseKey, status: str) -> bool:
        """End the execution: its outcome is known to have been told."""
        return self._finishing.count({**lease_values(key), "the_status": status}) == 1

    def _finish(self) -> Any:
        context, executions = self._context, self._executions
        return (
            update(executions)
            # Lost in a crash of the database, it would be told again, which every outcome may be.
            .where(context.fenced_given(), unhurried_commit())
            .values(updated_at=context.now(), **self._finished())
        )

    def set_aside(self, key: LeaseKey) -> bool:
        """Park for good, without an outcome: only a release or a cancel goes on from here."""
        return self._setting_aside.apply(key, {}) is not None

    # -- what each change sets -------------------------------------------------------------------

    def _parked(self) -> dict[str, Any]:
        crashes = self._executions.c.crashes
        return {
            "status": given(self._executions, "status"),
            "wake_at": self._context.instant_given(),
            "crashes": case((bindparam("has_progress", type_=Boolean()), 0), else_=crashes),
            **_UNOWNED,
        }

    def _retried(self) -> dict[str, Any]:
        version = self._executions.c.message_version + 1
        message = message_given(self._executions)
        return {**self._parked(), **message, "crashes": 0, "message_version": version}

    def _ended(self) -> dict[str, Any]:
        return {
            "status": Status.ENDING,
            "outcome": given(self._executions, "outcome"),
            "wake_at": self._context.now(seconds_given("ttl")),
            "crashes": 0,
        }

    def _closed(self) -> dict[str, Any]:
        return {"outcome": given(self._executions, "outcome"), **self._finished()}

    def _finished(self) -> dict[str, Any]:
        return {
            "status": given(self._executions, "status"),
            "wake_at": None,
            "finished_at": self._context.now(),
            **_UNOWNED,
        }

    def _settled(self, due: Due) -> datetime:
        with self._context.database.statements() as connection:
            settled: datetime = connection.execute(select(self._context.instant(due))).scalar_one()
        return settled


def _progress() -> dict[str, Any]:
    # Progress forgives the crashes before it.
    return {"crashes": 0}


def _set_aside() -> dict[str, Any]:
    return {"status": Status.QUARANTINED, "wake_at": None, **_UNOWNED}
