"""Leases after the claim: renewed, handed back, taken from the dead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, select, tuple_, update

from celery_durable.records import Due, LeaseKey, Outcome, OutcomeKind, Status
from celery_durable.rules import count_crash
from celery_durable.store.base import Context, outcome_from_text, outcome_to_text, row_of
from celery_durable.store.claims import crash_reason

#: Leases that one statement names; more take several, for databases limit its parameters.
PART = 1_000


class Leases:
    """Statements on leases; each names owner and token."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._executions = context.schema.executions

    def renew(self, keys: Sequence[LeaseKey], ttl: float) -> set[LeaseKey]:
        """Move the expiry of many leases to ``ttl`` seconds from now. Returns those that it has moved.

        A lease that ran out but that nobody has taken is renewed too: nothing was lost by being late. One
        whose row somebody else has locked is passed over, so that the others need not wait: ``still_held``
        tells it from a lost one.
        """
        context, executions = self._context, self._executions
        moved: set[LeaseKey] = set()
        with context.database.statements() as connection:
            for some in _in_parts(keys):
                renewed = connection.execute(
                    update(executions)
                    .where(self._held_and_free(some))
                    .values(wake_at=context.now(ttl))
                    .returning(*self._names)
                )
                moved.update(LeaseKey(task_id, owner, token) for task_id, owner, token in renewed)
        return moved

    def still_held(self, keys: Sequence[LeaseKey]) -> set[LeaseKey]:
        """Which of these leases their rows still name. Waits for nobody who has locked a row."""
        found: set[LeaseKey] = set()
        with self._context.database.statements() as connection:
            for some in _in_parts(keys):
                rows = connection.execute(select(*self._names).where(self._held(some)))
                found.update(LeaseKey(task_id, owner, token) for task_id, owner, token in rows)
        return found

    @property
    def _names(self) -> tuple[Any, Any, Any]:
        executions = self._executions
        return executions.c.task_id, executions.c.owner, executions.c.token

    def _held_and_free(self, keys: Sequence[LeaseKey]) -> ColumnElement[bool]:
        """The executions that these leases own and, where that can be, that nobody else has locked."""
        context, executions = self._context, self._executions
        if context.database.is_sqlite:
            return self._held(keys)
        free = (
            select(*self._names)
            .where(self._held(keys))
            .with_for_update(skip_locked=True, key_share=True)
            .cte("free")
        )
        return and_(
            context.mine(executions, free.c.task_id),
            executions.c.owner == free.c.owner,
            executions.c.token == free.c.token,
        )

    def lost_to(self, key: LeaseKey) -> Outcome | None:
        """The outcome by which a lease was lost, None where another worker took the execution."""
        executions = self._executions
        with self._context.database.statements() as connection:
            text = connection.execute(
                select(executions.c.outcome).where(self._context.mine(executions, key.task_id))
            ).scalar()
        return outcome_from_text(text)

    def hand_back(self, key: LeaseKey, delay: float = 0.0) -> bool:
        """Give a lease up without counting a crash; the execution is due ``delay`` seconds from now."""
        return self.hand_back_many([key], delay) == 1

    def hand_back_many(self, keys: Sequence[LeaseKey], delay: float = 0.0) -> int:
        """Give many leases up. Returns how many were still held."""
        return self._release(keys, delay)

    def tell_later(self, key: LeaseKey, outcome: Outcome, delay: float) -> bool:
        """Hand back what has an outcome that the result store did not take, and count that in it."""
        counted = replace(outcome, refusals=outcome.refusals + 1)
        return self._release([key], delay, outcome=outcome_to_text(counted)) == 1

    def _release(self, keys: Sequence[LeaseKey], delay: float, **values: Any) -> int:
        context = self._context
        released = self._change(
            keys,
            owner=None,
            sends=0,
            draining=False,
            wake_at=context.now(delay),
            updated_at=context.now(),
            **values,
        )
        if released:
            context.nearer(Due(seconds=delay))
        return released

    def make_due(self, task_id: str, delay: float = 0.0) -> bool:
        """Take back the wake that is on its way, if one is: its worker will not claim it.

        The execution is due ``delay`` seconds from now.
        """
        context, executions = self._context, self._executions
        with context.database.statements() as connection:
            changed = connection.execute(
                update(executions)
                .where(
                    context.mine(executions, task_id),
                    executions.c.owner.is_(None),
                    executions.c.sends > 0,
                    executions.c.wake_at.is_not(None),
                )
                .values(sends=0, wake_at=context.now(delay), updated_at=context.now())
            )
        if changed.rowcount:
            context.nearer(Due(seconds=delay))
        return changed.rowcount == 1

    def mark_draining(self, keys: Sequence[LeaseKey]) -> int:
        """Note that the worker of these leases was told to stop: if it dies now, that is no crash."""
        return self._change(keys, draining=True)

    def _change(self, keys: Sequence[LeaseKey], **values: Any) -> int:
        """Write columns of the executions that are still held. Returns how many."""
        changed = 0
        with self._context.database.statements() as connection:
            for some in _in_parts(keys):
                changed += connection.execute(
                    update(self._executions).where(self._held(some)).values(**values)
                ).rowcount
        return changed

    def recover(self, key: LeaseKey, max_crashes: int | None, delay: float = 0.0) -> Outcome | bool:
        """Take a lease from a process that is known to be dead, and count the crash.

        ``delay``: the least pause before its next claim, for a process that is about to be killed.

        Returns False if it was not held any more, the outcome where the crash limit was reached,
        else True.
        """
        context = self._context
        with context.database.transaction() as connection:
            answer = self._recover(connection, key, max_crashes, delay)
        if answer is not False:
            context.nearer()
        return answer

    def _recover(
        self, connection: Connection, key: LeaseKey, max_crashes: int | None, delay: float
    ) -> Outcome | bool:
        context, executions = self._context, self._executions
        found = (
            connection.execute(
                select(executions, context.now().label("now")).where(context.fenced(key)).with_for_update()
            )
            .mappings()
            .one_or_none()
        )
        if found is None:
            return False
        row = row_of(found, found["now"])
        ruling = count_crash(row, max_crashes=max_crashes, excused=row.draining)
        outcome = None
        changes = {"crashes": ruling.crashes, "wake_at": context.now(max(delay, ruling.delay))}
        if ruling.quarantine:
            outcome = Outcome(OutcomeKind.QUARANTINED, crash_reason(ruling.crashes))
            changes = {
                "crashes": 0,
                "wake_at": context.now(delay),
                "status": Status.ENDING,
                "outcome": outcome_to_text(outcome),
            }
        connection.execute(
            update(executions)
            .where(context.fenced(key))
            .values(owner=None, sends=0, draining=False, updated_at=context.now(), **changes)
        )
        return True if outcome is None else outcome

    def take_from_child(self, key: LeaseKey, owner: str, ttl: float, outcome: Outcome) -> LeaseKey | None:
        """End a run from outside (a hard time limit): the next token, with the outcome. None: refused."""
        context, executions = self._context, self._executions
        with context.database.statements() as connection:
            taken = connection.execute(
                update(executions)
                .where(context.fenced(key), executions.c.outcome.is_(None))
                .values(
                    owner=owner,
                    token=executions.c.token + 1,
                    status=Status.ENDING,
                    crashes=0,
                    outcome=outcome_to_text(outcome),
                    wake_at=context.now(ttl),
                    updated_at=context.now(),
                )
            )
            return LeaseKey(key.task_id, owner, key.token + 1) if taken.rowcount == 1 else None

    def _held(self, keys: Sequence[LeaseKey]) -> ColumnElement[bool]:
        """The executions that these leases still own."""
        context, executions = self._context, self._executions
        if len(keys) == 1:
            return context.fenced(keys[0])
        lease = tuple_(executions.c.task_id, executions.c.owner, executions.c.token)
        return and_(
            executions.c.namespace == context.namespace,
            # For the index; what is held is said by the next line.
            context.among(executions.c.task_id, [key.task_id for key in keys]),
            lease.in_([(key.task_id, key.owner, key.token) for key in keys]),
        )


def _in_parts(keys: Sequence[LeaseKey]) -> Iterator[Sequence[LeaseKey]]:
    for start in range(0, len(keys), PART):
        yield keys[start : start + PART]
