"""What a run writes: steps, sleeps, its end. Each is one short transaction with one fenced statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, delete, select, update

from celery_durable.records import (
    Due,
    Ended,
    Follower,
    JournalEntry,
    LeaseKey,
    Message,
    Outcome,
    Outgoing,
    Refusal,
    Status,
)
from celery_durable.replay import timer_id
from celery_durable.rules import DISPATCH_LEASE
from celery_durable.store.base import Context, message_columns, outcome_to_text
from celery_durable.store.claims import Claims
from celery_durable.store.dialect import insert
from celery_durable.store.outbox import enqueue


class Runs:
    """Statements of the holder of a lease. Their answers tell whether it still was the holder."""

    def __init__(self, context: Context, claims: Claims) -> None:
        self._context = context
        self._claims = claims
        self._executions = context.schema.executions
        self._journal = context.schema.journal

    def record(self, key: LeaseKey, entries: Sequence[JournalEntry]) -> bool:
        """Journal the steps of a run. False: the lease is not ours any more, nothing was written."""
        with self._context.database.transaction() as connection:
            if not self._progress(connection, key):
                return False
            self._insert(connection, key.task_id, entries)
            return True

    def record_sleep(self, key: LeaseKey, entries: Sequence[JournalEntry], due: Due) -> datetime | None:
        """Journal a sleep that is slept in place (the last of ``entries``). Its due time, or None: refused."""
        with self._context.database.transaction() as connection:
            if not self._progress(connection, key):
                return None
            due_at = self._settled(connection, due)
            self._insert(connection, key.task_id, entries, due_at)
            return due_at

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
        context, executions = self._context, self._executions
        changes: dict[str, Any] = {
            "status": status,
            "wake_at": context.instant(due),
            "owner": None,
            "sends": 0,
            "draining": False,
            "updated_at": context.now(),
        }
        if entries or message is not None:
            changes["crashes"] = 0
        if message is not None:
            changes |= message_columns(message)
            changes["message_version"] = executions.c.message_version + 1
        with context.database.transaction() as connection:
            parked = connection.execute(
                update(executions)
                .where(context.fenced(key), executions.c.outcome.is_(None))
                .values(**changes)
                .returning(executions.c.wake_at, context.now().label("now"))
            ).one_or_none()
            if parked is None:
                return None
            due_at: datetime = parked.wake_at
            if restart:
                connection.execute(delete(self._journal).where(context.mine(self._journal, key.task_id)))
            self._insert(connection, key.task_id, entries, due_at)
        context.nearer(Due(seconds=(due_at - parked.now).total_seconds()))
        return due_at

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
        context, executions = self._context, self._executions
        with context.database.transaction() as connection:
            ended = connection.execute(
                update(executions)
                .where(context.fenced(key), executions.c.outcome.is_(None))
                .values(
                    status=Status.ENDING,
                    outcome=outcome_to_text(outcome),
                    wake_at=context.now(ttl),
                    crashes=0,
                    updated_at=context.now(),
                )
            )
            if ended.rowcount == 0:
                # The answer to an earlier try may have been lost on its way: then it is there.
                return Ended((), ()) if self._has_outcome(connection, key) else None
            self._insert(connection, key.task_id, entries)
            return self._follow_all(connection, followers)

    def _has_outcome(self, connection: Connection, key: LeaseKey) -> bool:
        """Whether our own run has written its outcome: a verdict from outside takes the owner away."""
        executions = self._executions
        found = connection.execute(
            select(executions.c.task_id).where(self._context.fenced(key), executions.c.outcome.is_not(None))
        )
        return found.first() is not None

    def _follow_all(self, connection: Connection, followers: Sequence[Follower]) -> Ended:
        if not followers:
            return Ended((), ())
        # The worker sends them right after the commit. Until then they are taken, as by a scheduler.
        taken_until = self._settled(connection, Due(seconds=DISPATCH_LEASE))
        outgoing: list[Outgoing] = []
        refused: list[tuple[Follower, Refusal]] = []
        for follower in followers:
            refusal = self._follow(connection, follower, taken_until)
            if refusal is not None:
                refused.append((follower, refusal))
            elif follower.due is None:
                outgoing.append(_outgoing(follower, taken_until))
        return Ended(tuple(outgoing), tuple(refused))

    def finish(self, key: LeaseKey, status: str) -> bool:
        """End the execution: its outcome is known to have been told."""
        context, executions = self._context, self._executions
        with context.database.statements() as connection:
            finished = connection.execute(
                update(executions)
                .where(context.fenced(key))
                .values(
                    status=status,
                    wake_at=None,
                    owner=None,
                    sends=0,
                    draining=False,
                    finished_at=context.now(),
                    updated_at=context.now(),
                )
            )
            return finished.rowcount == 1

    def set_aside(self, key: LeaseKey) -> bool:
        """Park for good, without an outcome: only a release or a cancel goes on from here."""
        context, executions = self._context, self._executions
        with context.database.statements() as connection:
            parked = connection.execute(
                update(executions)
                .where(context.fenced(key), executions.c.outcome.is_(None))
                .values(
                    status=Status.QUARANTINED,
                    wake_at=None,
                    owner=None,
                    sends=0,
                    draining=False,
                    updated_at=context.now(),
                )
            )
            return parked.rowcount == 1

    def outcome_of(self, task_id: str) -> str | None:
        """The outcome text of a task, whoever owns it."""
        executions = self._executions
        with self._context.database.statements() as connection:
            return connection.execute(
                select(executions.c.outcome).where(self._context.mine(executions, task_id))
            ).scalar()

    def _follow(self, connection: Connection, follower: Follower, taken_until: datetime) -> Refusal | None:
        due, sends = (Due(at=taken_until), 1) if follower.due is None else (follower.due, 0)
        return enqueue(connection, self._context, self._claims, follower, due, sends=sends)

    def _progress(self, connection: Connection, key: LeaseKey) -> bool:
        """The fence of a journaling write. It holds the row until the commit, so that no one takes the
        execution over in between; progress forgives the crashes before it."""
        context, executions = self._context, self._executions
        fence = connection.execute(
            update(executions)
            .where(context.fenced(key), executions.c.outcome.is_(None))
            .values(crashes=0, updated_at=context.now())
        )
        return fence.rowcount == 1

    def _settled(self, connection: Connection, due: Due) -> datetime:
        if due.at is not None:
            return due.at
        settled: datetime = connection.execute(select(self._context.instant(due))).scalar_one()
        return settled

    def _insert(
        self,
        connection: Connection,
        task_id: str,
        entries: Iterable[JournalEntry],
        due_at: datetime | None = None,
    ) -> None:
        context = self._context
        rows = [
            {
                "namespace": context.namespace,
                "task_id": task_id,
                "position": entry.position,
                "kind": entry.kind,
                "name": entry.name,
                "timer_id": timer_id(task_id, entry.position),
                "due_at": due_at if entry.kind == "sleep" else None,
                "payload": entry.payload,
                "content_type": entry.content_type,
                "content_encoding": entry.content_encoding,
            }
            for entry in entries
        ]
        for row in rows:
            # A statement whose answer was lost is tried again by the same holder: its rows are there then.
            connection.execute(
                insert(self._journal, context.database.dialect_name)
                .values(**row, recorded_at=context.now())
                .on_conflict_do_nothing(index_elements=["namespace", "task_id", "position"])
            )


def _outgoing(follower: Follower, taken_until: datetime) -> Outgoing:
    delivery = follower.delivery
    return Outgoing(
        key=follower.key,
        status=Status.SCHEDULED if follower.is_durable else Status.OUTBOX,
        task_name=delivery.task_name,
        send_id=delivery.send_id,
        message_version=delivery.version,
        sends=1,
        taken_until=taken_until,
        message=delivery.message,
    )
