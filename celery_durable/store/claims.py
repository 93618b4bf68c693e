"""Deliveries: a message arrives, and an execution is opened, taken over, or left alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select, update

from celery_durable.clock import monotonic
from celery_durable.records import (
    Claim,
    Delivery,
    Due,
    LeaseKey,
    Outcome,
    OutcomeKind,
    Refusal,
    Row,
    Scheduled,
    Status,
)
from celery_durable.rules import (
    Action,
    Outage,
    Ruling,
    is_expired,
    rule_on_crash,
    rule_on_delivery,
    sends_before,
    start_of,
)
from celery_durable.store.base import (
    Context,
    due_values,
    given,
    message_given,
    message_values,
    outcome_to_text,
    row_of,
    sends_to_text,
)
from celery_durable.store.dialect import insert
from celery_durable.store.journal import JournalRows
from celery_durable.store.prepared import Prepared
from celery_durable.store.wakes import Wakes, fresh_lease

#: What is given for a new execution, besides its message and its time.
_NEW = (
    "task_id",
    "task_name",
    "status",
    "token",
    "owner",
    "sends",
    "message_version",
    "nesting",
    "send_id",
    "outcome",
)


class Claims:
    """Statements that let a delivery in."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._executions = context.schema.executions
        self._journal = JournalRows(context)
        self._wakes = Wakes(context)
        self._opening = Prepared(context, self._open)
        self._reopening = Prepared(context, self._reopen)

    def claim(
        self,
        delivery: Delivery,
        owner: str,
        ttl: float,
        max_crashes: int | None,
        outage: Outage | None = None,
    ) -> Claim | Refusal | Scheduled:
        """Take the execution of a delivery for ``owner``, for ``ttl`` seconds from now.

        Ownership passes from the broker to the lease when this returns a Claim: it has committed.
        """
        asked_at = monotonic()
        answer: Claim | Refusal | Scheduled | None = None
        if delivery.is_wake:
            answer = self._wakes.take(delivery, owner, ttl)
        elif delivery.eta is None and delivery.expires is None:
            answer = self._open_at_once(delivery, owner, ttl)
        if answer is None:
            with self._context.database.transaction() as connection:
                while answer is None:
                    answer = self._try_claim(connection, delivery, owner, ttl, max_crashes, outage)
        if isinstance(answer, Scheduled):
            self._context.nearer(Due(at=answer.due_at))
        return replace(answer, asked_at=asked_at) if isinstance(answer, Claim) else answer

    def _try_claim(
        self,
        connection: Connection,
        delivery: Delivery,
        owner: str,
        ttl: float,
        max_crashes: int | None,
        outage: Outage | None,
    ) -> Claim | Refusal | Scheduled | None:
        """One look at the row and what follows from it; None: it came into being meanwhile."""
        row, now, ruling = self._judged(connection, delivery)
        if ruling.action is Action.REFUSE:
            return Refusal(ruling.reason, ruling.is_fresh_send)
        if self._waits_for_its_eta(delivery, ruling, now):
            due = start_of(delivery, Due(at=delivery.eta), now)
            token = self._write(connection, delivery, row, Status.SCHEDULED, due)
            return None if token is None else Scheduled(due.at)
        verdict = _outcome_of(ruling.verdict, row)
        if verdict is None and is_expired(delivery, row, now):
            verdict = Outcome(OutcomeKind.EXPIRED)
        if ruling.action is Action.TAKE:
            assert row is not None
            return self._take(connection, row, owner, ttl, max_crashes, outage, verdict)
        token = self._write(
            connection,
            delivery,
            row,
            Status.RUNNING,
            Due(seconds=ttl),
            owner=owner,
            verdict=verdict,
        )
        if token is None:
            return None
        key = LeaseKey(delivery.task_id, owner, token)
        return _first_claim(key, now, verdict)

    def admit(
        self,
        connection: Connection,
        delivery: Delivery,
        due: Due,
        *,
        sends: int = 0,
    ) -> Refusal | None:
        """Let a message in without running it, inside the caller's transaction.

        For a countdown, a delivered ETA, a follower, or a message that waits too long in a worker: the
        rules are those of a claim, so an id that exists is never an error of the database. A live
        execution that waits for this very message is left as it is.
        """
        while True:
            row, now, ruling = self._judged(connection, delivery)
            if ruling.action is Action.REFUSE:
                return Refusal(ruling.reason, ruling.is_fresh_send)
            if ruling.action is Action.TAKE:
                return None
            verdict, when = _outcome_of(ruling.verdict, row), due
            if not sends:
                # What was cancelled before it came has nothing to wait for.
                when = start_of(delivery, due, now) if verdict is None else Due()
            token = self._write(
                connection, delivery, row, Status.SCHEDULED, when, sends=sends, verdict=verdict
            )
            if token is not None:
                return None

    def schedule(self, delivery: Delivery, due: Due, *, sends: int = 0) -> Refusal | None:
        """Let one message in, as a row that waits until it is due, in a transaction of its own."""
        refusal: Refusal | None = None
        if not self._schedule_at_once(delivery, due, sends):
            with self._context.database.transaction() as connection:
                refusal = self.admit(connection, delivery, due, sends=sends)
        if refusal is None:
            self._context.nearer(due)
        return refusal

    def _schedule_at_once(self, delivery: Delivery, due: Due, sends: int) -> bool:
        """The usual countdown in one statement; False where a row exists, or there is more to decide."""
        if delivery.is_wake or delivery.expires is not None:
            return False
        values = _new_values(delivery, Status.SCHEDULED, due, sends=sends)
        return self._opening.first(values) is not None

    def keep(self, delivery: Delivery, resend_delay: float) -> Refusal | None:
        """Make a row of a message that cannot run now: what a claim would do, without running anything.

        It is sent again after ``resend_delay`` seconds, or at its ETA, unless the message at hand is
        claimed before. A wake has its row already.
        """
        if delivery.is_wake:
            return None
        if delivery.eta is not None:
            return self.schedule(delivery, Due(at=delivery.eta))
        return self.schedule(delivery, Due(seconds=resend_delay), sends=1)

    @staticmethod
    def _waits_for_its_eta(delivery: Delivery, ruling: Ruling, now: datetime) -> bool:
        # A row that exists carries the time itself: wakes and copies keep the header of the first send.
        return (
            ruling.verdict is None
            and ruling.action is not Action.TAKE
            and not delivery.is_wake
            and delivery.eta is not None
            and delivery.eta > now
        )

    def _open_at_once(self, delivery: Delivery, owner: str, ttl: float) -> Claim | None:
        """The usual first delivery in one statement; None where a row exists."""
        values = _new_values(delivery, Status.RUNNING, Due(seconds=ttl), owner=owner, token=1)
        opened = self._opening.first(values)
        if opened is None:
            return None
        return _first_claim(LeaseKey(delivery.task_id, owner, 1), opened["updated_at"], None)

    def _open(self) -> Any:
        """A new row; no answer where there is one of that id."""
        columns = self._executions.c
        return (
            insert(self._executions, self._context.database.dialect_name)
            .values(namespace=self._context.namespace, **self._new_columns())
            .on_conflict_do_nothing(index_elements=["namespace", "task_id"])
            # SQLAlchemy 2.1 reports no row count of an INSERT on PostgreSQL.
            .returning(columns.token, columns.updated_at)
        )

    def _reopen(self) -> Any:
        """A new execution over one that has ended."""
        return (
            update(self._executions)
            .where(self._context.mine(self._executions, given(self._executions, "task_id")))
            .values(
                **self._new_columns(),
                past_sends=given(self._executions, "past_sends"),
                crashes=0,
                failures=0,
                draining=False,
                finished_at=None,
            )
        )

    def _new_columns(self) -> dict[str, Any]:
        """A new execution as expressions of what ``_new_values`` makes."""
        now = self._context.now()
        return {
            **{name: given(self._executions, name) for name in _NEW},
            **message_given(self._executions),
            "wake_at": self._context.instant_given(),
            "updated_at": now,
            "created_at": now,
        }

    def _judged(self, connection: Connection, delivery: Delivery) -> tuple[Row | None, datetime, Ruling]:
        """The row of a delivery's task, held; the database's time; what to do."""
        try:
            row, now = self._locked(connection, delivery.task_id)
        except ValueError as error:
            # It stays as it is, for a person to look at. Whoever brought the message goes on.
            row, now = None, connection.execute(select(self._context.now())).scalar_one()
            return row, now, Ruling(Action.REFUSE, f"its row cannot be read: {error}")
        return row, now, rule_on_delivery(row, delivery)

    def _locked(self, connection: Connection, task_id: str) -> tuple[Row | None, datetime]:
        """The row of a task, held until the transaction ends, and the database's time."""
        executions, context = self._executions, self._context
        statement = (
            select(executions, context.now().label("now"))
            .where(context.mine(executions, task_id))
            .with_for_update()
        )
        found = connection.execute(statement).mappings().one_or_none()
        if found is None:
            return None, connection.execute(select(context.now())).scalar_one()
        return row_of(found, found["now"]), found["now"]

    def _take(
        self,
        connection: Connection,
        row: Row,
        owner: str,
        ttl: float,
        max_crashes: int | None,
        outage: Outage | None,
        verdict: Outcome | None,
    ) -> Claim:
        """Take a live execution over."""
        executions, context = self._executions, self._context
        crashes, outcome = row.crashes, row.outcome
        if outcome is None:
            outcome = verdict
        if row.lease_expired:
            ruling = rule_on_crash(row, max_crashes=max_crashes, ttl=ttl, outage=outage)
            crashes = ruling.crashes
            if ruling.quarantine:
                outcome, crashes = Outcome(OutcomeKind.QUARANTINED, crash_reason(ruling.crashes)), 0
        status = Status.RUNNING if outcome is None else Status.ENDING
        connection.execute(
            update(executions)
            .where(context.mine(executions, row.task_id))
            .values(
                status=status,
                crashes=crashes,
                outcome=None if outcome is None else outcome_to_text(outcome),
                **fresh_lease(context, owner, ttl),
            )
        )
        return Claim(
            key=LeaseKey(row.task_id, owner, row.token + 1),
            status=status,
            outcome=outcome,
            journal=() if outcome is not None else self._journal.read(row.task_id, connection),
            crashes=crashes,
            recovered=row.lease_expired or row.status == Status.RUNNING,
            claimed_at=row.now,
            asked_at=0.0,
            found=row.status,
        )

    def _write(
        self,
        connection: Connection,
        delivery: Delivery,
        row: Row | None,
        status: str,
        due: Due,
        *,
        owner: str | None = None,
        sends: int = 0,
        verdict: Outcome | None = None,
    ) -> int | None:
        """Write a new execution, over the ended one of the same id if there is one.

        Returns its token; None where ``row`` was None and another process has written one since.
        """
        token = (row.token if row is not None else 0) + (1 if owner else 0)
        values = _new_values(delivery, status, due, owner=owner, sends=sends, token=token, verdict=verdict)
        if row is None:
            # Two deliveries of one id may race here on PostgreSQL, where nothing was there to lock:
            # the second waits for the first to commit, and then looks again.
            return None if self._opening.first(values, connection) is None else token
        past_sends = sends_to_text(sends_before(row, delivery))
        self._reopening.count({**values, "the_past_sends": past_sends}, connection)
        self._journal.clear(connection, delivery.task_id)
        return token


def _outcome_of(verdict: str | None, row: Row | None) -> Outcome | None:
    """What a verdict writes: a cancel that came before any message keeps the reason that it gave."""
    if verdict is None:
        return None
    given = None if row is None else row.outcome
    return given if given is not None and given.kind == verdict else Outcome(verdict)


def _new_values(
    delivery: Delivery,
    status: str,
    due: Due,
    *,
    owner: str | None = None,
    sends: int = 0,
    token: int = 0,
    verdict: Outcome | None = None,
) -> dict[str, Any]:
    """The values of a new execution; a ``verdict`` is its end at once."""
    return {
        "the_task_id": delivery.task_id,
        "the_task_name": delivery.task_name,
        "the_status": status if verdict is None else Status.ENDING,
        "the_token": token,
        "the_owner": owner,
        "the_sends": sends,
        "the_message_version": delivery.version,
        "the_nesting": delivery.nesting,
        "the_send_id": delivery.send_id,
        "the_outcome": None if verdict is None else outcome_to_text(verdict),
        **due_values(due),
        **message_values(delivery.message),
    }


def _first_claim(key: LeaseKey, claimed_at: datetime, outcome: Outcome | None) -> Claim:
    return Claim(
        key=key,
        status=Status.RUNNING if outcome is None else Status.ENDING,
        outcome=outcome,
        journal=(),
        crashes=0,
        recovered=False,
        claimed_at=claimed_at,
        asked_at=0.0,
    )


def crash_reason(crashes: int) -> str:
    """Why a task was quarantined, for people."""
    times = "once" if crashes == 1 else f"{crashes} times in a row"
    return f"its worker died {times} while running it, with nothing journaled in between"
