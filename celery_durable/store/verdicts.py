"""Verdicts: what people decide about executions from outside.

A cancel does not end a row: it writes the outcome and makes the row due, and the claim that finds the
outcome tells it. An outcome is written once, so a task is completed or cancelled, never both.

Every verdict takes many ids, or those of them that a filter still finds when they are locked. Rows that
another transaction holds at that moment are passed over at first and waited for one at a time, so that a
verdict on thousands never holds some rows while it waits for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, and_, func, or_, select, update

from celery_durable.records import Due, Kind, Outcome, OutcomeKind, Status
from celery_durable.store.base import Context, outcome_to_text
from celery_durable.store.dialect import insert, shifted
from celery_durable.store.filters import Filter, condition
from celery_durable.store.moves import NO_LOOPS, among, moving, shifted_wake_at

#: The most rows of one transaction: nobody waits longer for a row than these take.
CHUNK = 1000
#: The same of a move, which is one statement that finds its rows in two ranges of an index.
MOVE_CHUNK = 5000

_Answer = TypeVar("_Answer")
#: Takes locked rows, in the order of their ids; answers by id for those that it changed.
_Statement = Callable[[Connection, Sequence[Any]], dict[str, _Answer]]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A cancel that was accepted. ``headers``: the message's, as JSON; None: no message has come yet."""

    task_id: str
    task_name: str
    headers: str | None


class Verdicts:
    """Statements of operators and of durable revoke."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._executions = context.schema.executions
        self._journal = context.schema.journal

    # -- cancel ----------------------------------------------------------------------------------

    def cancel(
        self, task_ids: Sequence[str], reason: str | None = None, *, only: Filter | None = None
    ) -> dict[str, Cancelled]:
        """Cancel for good. Returns what was accepted, by id; what has an outcome already is refused.

        An id that no row has is remembered as cancelled, so that its first message is not run. With a
        filter, ``only`` rows that it finds are meant, and nothing is remembered.
        """
        outcome = outcome_to_text(Outcome(OutcomeKind.CANCELLED, reason))
        wanted = self._open_for_cancel(only)
        cancelled: dict[str, Cancelled] = {}
        for chunk in _chunks(task_ids):
            cancelled |= self._apply(
                chunk, wanted, lambda c, rows: self._cancel(c, rows, outcome), in_order=only is not None
            )
            if only is None:
                cancelled |= self._cancel_unknown([i for i in chunk if i not in cancelled], wanted, outcome)
        if any(item.headers is not None for item in cancelled.values()):
            self._context.nearer()
        return cancelled

    def _cancel(self, connection: Connection, rows: Sequence[Any], outcome: str) -> dict[str, Cancelled]:
        context, executions = self._context, self._executions
        written = connection.execute(
            update(executions)
            .where(among(context, executions, [row.task_id for row in rows], in_order=True))
            .values(
                status=Status.ENDING,
                outcome=outcome,
                owner=None,
                sends=0,
                crashes=0,
                draining=False,
                wake_at=context.now(),
                finished_at=None,
                updated_at=context.now(),
            )
            .returning(executions.c.task_id, executions.c.task_name, executions.c.headers)
        )
        return {row.task_id: Cancelled(row.task_id, row.task_name, row.headers or "{}") for row in written}

    def _cancel_unknown(
        self, task_ids: Sequence[str], wanted: ColumnElement[bool], outcome: str
    ) -> dict[str, Cancelled]:
        if not task_ids:
            return {}
        remembered = self._remember(task_ids, outcome)
        # The others have a row: refused just now, or first claimed in between, and then to be cancelled.
        others = [i for i in task_ids if i not in remembered]
        if others:
            remembered |= self._apply(
                others, wanted, lambda c, rows: self._cancel(c, rows, outcome), in_order=False
            )
        return remembered

    def _remember(self, task_ids: Sequence[str], outcome: str) -> dict[str, Cancelled]:
        """Write a bare row for each id that has none."""
        context, executions = self._context, self._executions
        statement = (
            insert(executions, context.database.dialect_name)
            .values(
                namespace=context.namespace,
                task_name="",
                outcome=outcome,
                status=Status.CANCELLED,
                created_at=context.now(),
                updated_at=context.now(),
                finished_at=context.now(),
            )
            .on_conflict_do_nothing(index_elements=["namespace", "task_id"])
            .returning(executions.c.task_id)
        )
        with context.database.statements() as connection:
            # In one order, so that of two processes with the same ids one waits for the other, not both.
            written = connection.execute(statement, [{"task_id": task_id} for task_id in sorted(task_ids)])
            return {task_id: Cancelled(task_id, "", None) for task_id in written.scalars()}

    def _open_for_cancel(self, only: Filter | None) -> ColumnElement[bool]:
        executions = self._executions
        return and_(
            executions.c.body.is_not(None),
            or_(
                and_(
                    executions.c.status.in_((*Status.LIVE, Status.QUARANTINED)),
                    executions.c.outcome.is_(None),
                ),
                executions.c.status == Status.REPLACED,
            ),
            *self._chosen(only),
        )

    # -- release ---------------------------------------------------------------------------------

    def release(self, task_ids: Sequence[str], *, only: Filter | None = None) -> set[str]:
        """Let quarantined executions run again, at once. Returns those that were quarantined."""
        executions = self._executions
        wanted = and_(
            executions.c.status == Status.QUARANTINED,
            executions.c.body.is_not(None),
            *self._chosen(only),
        )
        released: set[str] = set()
        for chunk in _chunks(task_ids):
            released |= self._apply(chunk, wanted, self._release, in_order=only is not None).keys()
        if released:
            self._context.nearer()
        return released

    def _release(self, connection: Connection, rows: Sequence[Any]) -> dict[str, None]:
        context, executions = self._context, self._executions
        task_ids = [row.task_id for row in rows]
        connection.execute(
            update(executions)
            .where(among(context, executions, task_ids, in_order=True))
            .values(
                status=Status.RUNNING,
                outcome=None,
                crashes=0,
                sends=0,
                owner=None,
                draining=False,
                wake_at=context.now(),
                finished_at=None,
                updated_at=context.now(),
            )
        )
        return dict.fromkeys(task_ids)

    # -- move ------------------------------------------------------------------------------------

    def move(
        self,
        task_ids: Sequence[str],
        due: Due,
        *,
        relative: bool = False,
        only: Filter | None = None,
    ) -> dict[str, datetime]:
        """Move parked executions to another time (``relative``: by ``due.seconds`` from their own).

        The open sleep's journaled due time moves with it. Running and ended ones are left alone.
        Returns the new times of those that were moved.
        """
        executions = self._executions
        wanted = and_(executions.c.status.in_(Status.PARKED), *self._chosen(only))
        if not relative and due.at is None:
            due = Due(at=self._instant(due))
        moved: dict[str, datetime] = {}
        in_order = only is not None
        for chunk in _chunks(task_ids, MOVE_CHUNK):
            done = self._move_at_once(chunk, wanted, due, in_order)
            moved |= done | self._apply_to_rest(
                chunk, done, wanted, lambda c, rows: self._move(c, rows, due), in_order
            )
        if moved:
            self._context.nearer(Due(at=min(moved.values())))
        return moved

    def _move_at_once(
        self, task_ids: Sequence[str], wanted: ColumnElement[bool], due: Due, in_order: bool
    ) -> dict[str, datetime]:
        """Lock rows and move them and their sleeps, by one statement where the database can do that."""
        if self._context.database.is_sqlite or len(task_ids) == 1:
            return self._on_locked(task_ids, wanted, lambda c, rows: self._move(c, rows, due), in_order)
        with self._context.database.transaction() as connection:
            connection.execute(NO_LOOPS)
            moved = connection.execute(moving(self._context, task_ids, wanted, due, in_order))
            return {row.task_id: row.wake_at for row in moved}

    def _instant(self, due: Due) -> datetime:
        with self._context.database.statements() as connection:
            instant: datetime = connection.execute(select(self._context.instant(due))).scalar_one()
        return instant

    def _move(self, connection: Connection, rows: Sequence[Any], due: Due) -> dict[str, datetime]:
        """Move locked rows: to ``due.at``, or by ``due.seconds`` where there is none."""
        asleep = [row.task_id for row in rows if row.status == Status.SLEEPING]
        moved = self._move_sleeps(connection, asleep, due) if asleep else {}
        others = [row.task_id for row in rows if row.task_id not in moved]
        if moved:
            sleepers = [task_id for task_id in asleep if task_id in moved]
            self._set_wake_at(connection, sleepers, due.at or self._open_sleep())
        if others:
            moved |= self._set_wake_at(
                connection, others, due.at or shifted_wake_at(self._context, due.seconds)
            )
        return moved

    def _move_sleeps(self, connection: Connection, task_ids: Sequence[str], due: Due) -> dict[str, datetime]:
        """Move the journaled due time of the last sleep of each execution."""
        journal = self._journal
        earlier = journal.alias()
        last = (
            select(func.max(earlier.c.position))
            .where(
                earlier.c.namespace == journal.c.namespace,
                earlier.c.task_id == journal.c.task_id,
                earlier.c.kind == Kind.SLEEP,
            )
            .scalar_subquery()
        )
        written = connection.execute(
            update(journal)
            .where(
                among(self._context, journal, task_ids, in_order=True),
                journal.c.position == last,
                journal.c.due_at.is_not(None),
            )
            .values(due_at=due.at or shifted(journal.c.due_at, due.seconds))
            .returning(journal.c.task_id, journal.c.due_at)
        )
        return {row.task_id: row.due_at for row in written}

    def _open_sleep(self) -> Any:
        """The due time of an execution's last sleep."""
        executions, journal = self._executions, self._journal
        return (
            select(journal.c.due_at)
            .where(
                journal.c.namespace == executions.c.namespace,
                journal.c.task_id == executions.c.task_id,
                journal.c.kind == Kind.SLEEP,
            )
            .order_by(journal.c.position.desc())
            .limit(1)
            .scalar_subquery()
        )

    def _set_wake_at(
        self, connection: Connection, task_ids: Sequence[str], instant: Any
    ) -> dict[str, datetime]:
        executions = self._executions
        written = connection.execute(
            update(executions)
            .where(among(self._context, executions, task_ids, in_order=True))
            .values(wake_at=instant, sends=0, updated_at=self._context.now())
            .returning(executions.c.task_id, executions.c.wake_at)
        )
        return {row.task_id: row.wake_at for row in written}

    # -- many at once ----------------------------------------------------------------------------

    def _apply(
        self,
        task_ids: Sequence[str],
        wanted: ColumnElement[bool],
        statement: _Statement[_Answer],
        *,
        in_order: bool,
    ) -> dict[str, _Answer]:
        """Run a statement on those of the rows that are wanted, each of them locked."""
        done = self._on_locked(task_ids, wanted, statement, in_order)
        return done | self._apply_to_rest(task_ids, done, wanted, statement, in_order)

    def _apply_to_rest(
        self,
        task_ids: Sequence[str],
        done: dict[str, _Answer],
        wanted: ColumnElement[bool],
        statement: _Statement[_Answer],
        in_order: bool,
    ) -> dict[str, _Answer]:
        """Wait for the rows that were passed over, one at a time."""
        answers: dict[str, _Answer] = {}
        if len(task_ids) > 1:
            for task_id in self._wanted([i for i in task_ids if i not in done], wanted, in_order):
                answers |= self._on_locked([task_id], wanted, statement, True)
        return answers

    def _on_locked(
        self,
        task_ids: Sequence[str],
        wanted: ColumnElement[bool],
        statement: _Statement[_Answer],
        in_order: bool,
    ) -> dict[str, _Answer]:
        executions = self._executions
        with self._context.database.transaction() as connection:
            rows = connection.execute(
                select(executions.c.task_id, executions.c.status)
                .where(among(self._context, executions, task_ids, in_order), wanted)
                .order_by(executions.c.task_id)
                .with_for_update(skip_locked=len(task_ids) > 1)
            ).all()
            return statement(connection, rows) if rows else {}

    def _wanted(self, task_ids: Sequence[str], wanted: ColumnElement[bool], in_order: bool) -> Sequence[str]:
        if not task_ids:
            return ()
        executions = self._executions
        with self._context.database.statements() as connection:
            found = connection.execute(
                select(executions.c.task_id).where(
                    among(self._context, executions, task_ids, in_order), wanted
                )
            )
            return found.scalars().all()

    def _chosen(self, only: Filter | None) -> tuple[ColumnElement[bool], ...]:
        return () if only is None else (condition(self._context, only),)


def _chunks(task_ids: Sequence[str], size: int = CHUNK) -> Iterator[list[str]]:
    """The ids, each once, in pieces of one transaction each."""
    rest = iter(dict.fromkeys(task_ids))
    while chunk := list(islice(rest, size)):
        yield chunk
