"""The usual wake: a parked execution that waits for just this message is taken without a look before."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, Update, select, update

from celery_durable.records import Claim, Delivery, JournalEntry, LeaseKey, Status
from celery_durable.store.base import Context, entry_of
from celery_durable.store.journal import JournalRows


def fresh_lease(context: Context, owner: str, ttl: float) -> dict[str, Any]:
    """What a claim writes: the next token, no wake on its way, a lease of ``ttl`` seconds."""
    return {
        "token": context.schema.executions.c.token + 1,
        "owner": owner,
        "wake_at": context.now(ttl),
        "sends": 0,
        "failures": 0,
        "draining": False,
        "updated_at": context.now(),
    }


class Wakes:
    """Claims of wakes that need no decision."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._executions = context.schema.executions
        self._journal = JournalRows(context)

    def take(self, delivery: Delivery, owner: str, ttl: float) -> Claim | None:
        """Take the execution and read its journal. None: look closer."""
        if delivery.send_id is None:
            return None
        if self._context.database.dialect_name == "postgresql":
            return self._take_in_one_statement(delivery, owner, ttl)
        with self._context.database.transaction() as connection:
            mine = self._context.mine(self._executions, delivery.task_id)
            status = connection.execute(select(self._executions.c.status).where(mine)).scalar()
            taken = connection.execute(self._taking(delivery, owner, ttl)).mappings().one_or_none()
            if taken is None:
                return None
            return _claim(delivery, owner, taken, status, self._journal.read(connection, delivery.task_id))

    def _take_in_one_statement(self, delivery: Delivery, owner: str, ttl: float) -> Claim | None:
        statement = self._with_journal(self._taking(delivery, owner, ttl), delivery.task_id)
        with self._context.database.statements() as connection:
            found = connection.execute(statement).mappings().all()
            if not found:
                return None
            entries = tuple(entry_of(row) for row in found if row["position"] is not None)
            if found[0]["token_seen"] + 1 != found[0]["new_token"]:
                # It had to wait for the row, and the journal that it saw is from before that.
                entries = self._journal.read(connection, delivery.task_id)
        return _claim(delivery, owner, found[0], found[0]["status_seen"], entries)

    def _taking(self, delivery: Delivery, owner: str, ttl: float) -> Any:
        context, executions = self._context, self._executions
        # What has not started yet may have expired.
        parked = Status.PARKED if delivery.expires is None else Status.PARKED - {Status.SCHEDULED}
        taking: Update = (
            update(executions)
            .where(
                context.mine(executions, delivery.task_id),
                executions.c.status.in_(sorted(parked)),
                executions.c.sends > 0,
                executions.c.owner.is_(None),
                executions.c.outcome.is_(None),
                executions.c.send_id == delivery.send_id,
                executions.c.nesting == delivery.nesting,
                executions.c.message_version == delivery.version,
            )
            .values(**fresh_lease(context, owner, ttl), status=Status.RUNNING)
        )
        now = context.now().label("now")
        return taking.returning(executions.c.token.label("new_token"), executions.c.crashes, now)

    def _with_journal(self, taking: Any, task_id: str) -> Select[Any]:
        """The execution taken and its journal read by one statement, where the database can do that.

        All of it sees the tables as they were when it began; ``token_seen`` tells whether that was still
        true when the row was taken, ``status_seen`` what it waited for.
        """
        journal, mine = self._context.schema.journal, self._context.mine
        taken = taking.cte("taken")
        before = self._executions.alias("before")
        seen = (before.c.token.label("token_seen"), before.c.status.label("status_seen"))
        return (
            select(taken, *seen, *self._journal.columns())
            .select_from(taken.join(before, mine(before, task_id)).outerjoin(journal, mine(journal, task_id)))
            .order_by(journal.c.position)
        )


def _claim(
    delivery: Delivery, owner: str, taken: Any, status: str | None, entries: tuple[JournalEntry, ...]
) -> Claim:
    return Claim(
        key=LeaseKey(delivery.task_id, owner, taken["new_token"]),
        status=Status.RUNNING,
        outcome=None,
        journal=entries,
        crashes=taken["crashes"],
        recovered=False,
        claimed_at=taken["now"],
        asked_at=0.0,
        found=status,
    )
