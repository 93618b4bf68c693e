"""The beat schedule's state: when an entry last ran and when it runs next. Entries themselves are configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, select, update

from celery_durable.records import Message, Status
from celery_durable.store.base import Context, message_columns
from celery_durable.store.dialect import insert

#: Seconds after which the row of an entry that no scheduler has any more is dropped.
UNSEEN_SECONDS = 30 * 86400.0
#: The name of the row that carries the time of the last tick.
TICK = ""


@dataclass(frozen=True, slots=True)
class EntryState:
    """What is stored of one beat entry."""

    name: str
    definition: str
    last_run_at: datetime | None
    next_run_at: datetime | None
    total_run_count: int


class ScheduleRows:
    """Statements on beat entries."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._schedule = context.schema.schedule

    def load(self, names: Sequence[str]) -> tuple[dict[str, EntryState], datetime]:
        """The stored state of these entries, and the database's time."""
        context, schedule = self._context, self._schedule
        with context.database.statements() as connection:
            now = connection.execute(select(context.now())).scalar_one()
            rows = (
                connection.execute(
                    select(schedule).where(
                        schedule.c.namespace == context.namespace, schedule.c.name.in_(names)
                    )
                )
                .mappings()
                .all()
            )
        return {row["name"]: _state(row) for row in rows}, now

    def define(self, name: str, definition: str, next_run_at: datetime | None) -> None:
        """Write a new entry, or a changed one: its next run is ``next_run_at``. An unchanged one is left."""
        context, schedule = self._context, self._schedule
        statement = insert(schedule, context.database.dialect_name).values(
            namespace=context.namespace,
            name=name,
            definition=definition,
            next_run_at=next_run_at,
            seen_at=context.now(),
        )
        with context.database.statements() as connection:
            connection.execute(
                statement.on_conflict_do_update(
                    index_elements=["namespace", "name"],
                    set_={
                        "definition": statement.excluded.definition,
                        "next_run_at": statement.excluded.next_run_at,
                        "seen_at": statement.excluded.seen_at,
                    },
                    where=schedule.c.definition != definition,
                )
            )

    def touch(self, names: Sequence[str]) -> None:
        """Note that a scheduler still has these entries, and that it ticks."""
        context, schedule = self._context, self._schedule
        tick = insert(schedule, context.database.dialect_name).values(
            namespace=context.namespace, name=TICK, definition="", seen_at=context.now()
        )
        with context.database.transaction() as connection:
            connection.execute(
                tick.on_conflict_do_update(
                    index_elements=["namespace", "name"], set_={"seen_at": tick.excluded.seen_at}
                )
            )
            if names:
                connection.execute(
                    update(schedule)
                    .where(schedule.c.namespace == context.namespace, schedule.c.name.in_(names))
                    .values(seen_at=context.now())
                )

    def seconds_since_tick(self) -> float | None:
        """How long ago a scheduler of this namespace was last seen; None: never."""
        context, schedule = self._context, self._schedule
        with context.database.statements() as connection:
            found = connection.execute(
                select(schedule.c.seen_at, context.now().label("now")).where(
                    schedule.c.namespace == context.namespace, schedule.c.name == TICK
                )
            ).one_or_none()
        return None if found is None else (found.now - found.seen_at).total_seconds()

    def advance(
        self,
        state: EntryState,
        next_run_at: datetime | None,
        ran_at: datetime | None,
        *,
        key: str | None = None,
        task_name: str = "",
        message: Message | None = None,
    ) -> bool:
        """Move an entry on, if no other scheduler has, and put its message into the outbox.

        One transaction: the scheduler that moves the entry is the one that owes the run, and a broker
        that is away loses nothing. ``ran_at`` None: the run is skipped. False: another one was first.
        """
        context, schedule = self._context, self._schedule
        changes = {"next_run_at": next_run_at, "seen_at": context.now()}
        if ran_at is not None:
            changes |= {"last_run_at": ran_at, "total_run_count": schedule.c.total_run_count + 1}
        with context.database.transaction() as connection:
            moved = connection.execute(
                update(schedule)
                .where(
                    schedule.c.namespace == context.namespace,
                    schedule.c.name == state.name,
                    schedule.c.definition == state.definition,
                    schedule.c.next_run_at == state.next_run_at,
                )
                .values(**changes)
            )
            if moved.rowcount == 0:
                return False
            if message is not None:
                connection.execute(
                    context.schema.executions.insert().values(
                        namespace=context.namespace,
                        task_id=key,
                        task_name=task_name,
                        status=Status.OUTBOX,
                        wake_at=context.now(),
                        sends=0,
                        created_at=context.now(),
                        updated_at=context.now(),
                        **message_columns(message),
                    )
                )
            return True

    def prune(self) -> int:
        """Drop the rows of entries that no scheduler has had for a month."""
        context, schedule = self._context, self._schedule
        with context.database.statements() as connection:
            return connection.execute(
                delete(schedule).where(
                    schedule.c.namespace == context.namespace,
                    schedule.c.name != TICK,
                    schedule.c.seen_at <= context.now(-UNSEEN_SECONDS),
                )
            ).rowcount


def _state(row) -> EntryState:  # type: ignore[no-untyped-def]
    return EntryState(
        name=row["name"],
        definition=row["definition"],
        last_run_at=row["last_run_at"],
        next_run_at=row["next_run_at"],
        total_run_count=row["total_run_count"],
    )
