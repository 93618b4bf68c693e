"""The usual wake: a parked execution that waits for just this message is taken without a look before."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from sqlalchemy import Select, or_, select, update

from celery_durable.records import Claim, Delivery, JournalEntry, LeaseKey, Status
from celery_durable.store.base import Context, entry_of, given, most_seconds, seconds_given
from celery_durable.store.journal import JournalRows
from celery_durable.store.prepared import Prepared


def fresh_lease(context: Context, owner: Any, ttl: Any) -> dict[str, Any]:
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
        # What has not started yet may have expired.
        started = Status.PARKED - {Status.SCHEDULED}
        self._looking = Prepared(context, self._look)
        self._taking = {
            is_limited: Prepared(context, partial(self._take, parked))
            for is_limited, parked in ((False, Status.PARKED), (True, started))
        }

    def take(self, delivery: Delivery, owner: str, ttl: float) -> Claim | None:
        """Take the execution and read its journal. None: look closer."""
        if delivery.send_id is None:
            return None
        taking = self._taking[delivery.expires is not None]
        values = {
            "the_task_id": delivery.task_id,
            "the_send_id": delivery.send_id,
            "the_nesting": delivery.nesting,
            "the_message_version": delivery.version,
            "the_owner": owner,
            "ttl": most_seconds(ttl),
        }
        if self._is_one_statement:
            return self._take_with_journal(taking, delivery, values)
        with self._context.database.transaction() as connection:
            seen = self._looking.first({"the_task_id": delivery.task_id}, connection)
            taken = taking.first(values, connection)
            if seen is None or taken is None:
                return None
            entries = self._journal.read(delivery.task_id, connection)
        return _claim(delivery, owner, taken, seen["status"], entries)

    @property
    def _is_one_statement(self) -> bool:
        return self._context.database.dialect_name == "postgresql"

    def _take_with_journal(
        self, taking: Prepared, delivery: Delivery, values: Mapping[str, Any]
    ) -> Claim | None:
        found = taking.all(values)
        if not found:
            return None
        entries = tuple(entry_of(row) for row in found if row["position"] is not None)
        if found[0]["token_seen"] + 1 != found[0]["new_token"]:
            # It had to wait for the row, and the journal that it saw is from before that.
            entries = self._journal.read(delivery.task_id)
        return _claim(delivery, values["the_owner"], found[0], found[0]["status_seen"], entries)

    def _look(self) -> Any:
        mine = self._context.mine(self._executions, given(self._executions, "task_id"))
        return select(self._executions.c.status).where(mine)

    def _take(self, parked: frozenset[str]) -> Any:
        context, executions = self._context, self._executions
        columns = executions.c
        taking = (
            update(executions)
            .where(
                context.mine(executions, given(executions, "task_id")),
                or_(*(columns.status == status for status in sorted(parked))),
                columns.sends > 0,
                columns.owner.is_(None),
                columns.outcome.is_(None),
                columns.send_id == given(executions, "send_id"),
                columns.nesting == given(executions, "nesting"),
                columns.message_version == given(executions, "message_version"),
            )
            .values(
                **fresh_lease(context, given(executions, "owner"), seconds_given("ttl")),
                status=Status.RUNNING,
            )
        )
        taken = taking.returning(
            columns.token.label("new_token"), columns.crashes, context.now().label("now")
        )
        return self._with_journal(taken) if self._is_one_statement else taken

    def _with_journal(self, taking: Any) -> Select[Any]:
        """The execution taken and its journal read by one statement, where the database can do that.

        All of it sees the tables as they were when it began; ``token_seen`` tells whether that was still
        true when the row was taken, ``status_seen`` what it waited for.
        """
        journal, mine = self._context.schema.journal, self._context.mine
        taken = taking.cte("taken")
        before = self._executions.alias("before")
        seen = (before.c.token.label("token_seen"), before.c.status.label("status_seen"))
        task_id = given(self._executions, "task_id")
        return (
            select(taken, *seen, *self._journal.columns())
            .select_from(taken.join(before, mine(before, task_id)).outerjoin(journal, mine(journal, task_id)))
            .order_by(journal.c.position)
        )


def _claim(
    delivery: Delivery,
    owner: str,
    taken: Mapping[str, Any],
    status: str | None,
    entries: tuple[JournalEntry, ...],
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
