"""The beat schedule's state: when an entry last ran and when it runs next. Entries are configuration.

``next_run_at`` is moved by the scheduler that runs an entry, and by a change of its definition; by nothing
else. A scheduler first takes an entry for some seconds, builds the message, and then writes both the
advance and the message in one transaction: one scheduler alone runs it, and one that dies in between
leaves it to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, or_, select, update

from celery_durable.records import Due, Follower, Refusal
from celery_durable.store.base import Context
from celery_durable.store.claims import Claims
from celery_durable.store.dialect import insert
from celery_durable.store.outbox import enqueue

#: Seconds after which the row of an entry that no scheduler has any more is dropped.
UNSEEN_SECONDS = 30 * 86400.0
#: The name of the row that carries the time of the last tick.
TICK = ""


@dataclass(frozen=True, slots=True)
class Definition:
    """An entry that is new, or not the one that is stored: its fingerprint, and when it is to run first."""

    name: str
    definition: str
    next_run_at: datetime | None


@dataclass(frozen=True, slots=True)
class EntryState:
    """What is stored of one beat entry.

    ``taken_until``: a scheduler is about to run it. ``seen_at``: when a scheduler last had it so defined.
    """

    name: str
    definition: str
    last_run_at: datetime | None
    next_run_at: datetime | None
    total_run_count: int
    taken_until: datetime | None
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class Taken:
    """An entry that this scheduler is about to run, until ``until``."""

    state: EntryState
    until: datetime
    now: datetime


@dataclass(frozen=True, slots=True)
class Advanced:
    """An entry that was moved on, and those of its messages that could not be let in."""

    state: EntryState
    refused: tuple[tuple[Follower, Refusal], ...]


class ScheduleRows:
    """Statements on beat entries."""

    def __init__(self, context: Context, claims: Claims) -> None:
        self._context = context
        self._claims = claims
        self._schedule = context.schema.schedule

    def load(self, names: Sequence[str]) -> tuple[dict[str, EntryState], datetime]:
        """The stored state of these entries, and the database's time."""
        context, schedule = self._context, self._schedule
        with context.database.statements() as connection:
            now = connection.execute(select(context.now())).scalar_one()
            rows = (
                connection.execute(
                    select(schedule).where(
                        schedule.c.namespace == context.namespace, context.among(schedule.c.name, names)
                    )
                )
                .mappings()
                .all()
            )
        return {row["name"]: _state(row) for row in rows}, now

    def define(self, entries: Sequence[Definition]) -> None:
        """Write new and changed entries. One that is stored with the same definition is left as it is."""
        if not entries:
            return
        context, schedule = self._context, self._schedule
        statement = insert(schedule, context.database.dialect_name)
        statement = statement.on_conflict_do_update(
            index_elements=["namespace", "name"],
            set_={
                "definition": statement.excluded.definition,
                "next_run_at": statement.excluded.next_run_at,
                "seen_at": statement.excluded.seen_at,
                "taken_until": None,
            },
            where=schedule.c.definition != statement.excluded.definition,
        )
        with context.database.transaction() as connection:
            # In one order, so that two schedulers that start together wait for each other, not both.
            for entry in sorted(entries, key=lambda entry: entry.name):
                connection.execute(
                    statement.values(
                        namespace=context.namespace,
                        name=entry.name,
                        definition=entry.definition,
                        # As Celery's: a schedule of somebody else's class is asked from when it was new.
                        last_run_at=context.now(),
                        next_run_at=entry.next_run_at,
                        seen_at=context.now(),
                    )
                )

    def take(self, state: EntryState, seconds: float) -> Taken | None:
        """Take an entry that is due, so as to run it within some seconds. None: another one was first."""
        context, schedule = self._context, self._schedule
        with context.database.statements() as connection:
            taken = connection.execute(
                update(schedule)
                .where(
                    schedule.c.namespace == context.namespace,
                    schedule.c.name == state.name,
                    schedule.c.definition == state.definition,
                    schedule.c.next_run_at == state.next_run_at,
                    schedule.c.next_run_at <= context.now(),
                    or_(schedule.c.taken_until.is_(None), schedule.c.taken_until <= context.now()),
                )
                .values(taken_until=context.now(seconds))
                .returning(schedule.c.taken_until, context.now().label("now"))
            ).one_or_none()
        return None if taken is None else Taken(state, taken.taken_until, taken.now)

    def advance(
        self,
        taken: Taken,
        next_run_at: datetime | None,
        *,
        has_run: bool,
        messages: Sequence[Follower] = (),
    ) -> Advanced | None:
        """Move an entry on, and write what it sends, in one transaction.

        The scheduler that moves the entry is the one that owes the run, and a broker that is away loses
        nothing. Without ``has_run`` the run was skipped. None: another scheduler has it by now.
        """
        context, schedule = self._context, self._schedule
        changes: dict[str, Any] = {
            "next_run_at": next_run_at,
            "taken_until": None,
            "seen_at": context.now(),
        }
        if has_run:
            changes |= {"last_run_at": taken.now, "total_run_count": schedule.c.total_run_count + 1}
        with context.database.transaction() as connection:
            row = (
                connection.execute(
                    update(schedule)
                    .where(
                        schedule.c.namespace == context.namespace,
                        schedule.c.name == taken.state.name,
                        schedule.c.definition == taken.state.definition,
                        schedule.c.taken_until == taken.until,
                    )
                    .values(**changes)
                    .returning(schedule)
                )
                .mappings()
                .one_or_none()
            )
            if row is None:
                return None
            refused = []
            for follower in messages:
                due = follower.due or Due()
                refusal = enqueue(connection, context, self._claims, follower, due)
                if refusal is not None:
                    refused.append((follower, refusal))
            return Advanced(_state(row), tuple(refused))

    def keep(self, definitions: Mapping[str, str]) -> None:
        """Note that a scheduler still has these entries (name → definition)."""
        if not definitions:
            return
        context, schedule = self._context, self._schedule
        with context.database.statements() as connection:
            connection.execute(
                update(schedule)
                .where(
                    schedule.c.namespace == context.namespace,
                    context.among(schedule.c.name, list(definitions)),
                    context.among(schedule.c.definition, sorted(set(definitions.values()))),
                )
                .values(seen_at=context.now())
            )

    def tick(self) -> None:
        """Note that a scheduler of this namespace is alive."""
        context, schedule = self._context, self._schedule
        statement = insert(schedule, context.database.dialect_name).values(
            namespace=context.namespace, name=TICK, definition="", seen_at=context.now()
        )
        with context.database.statements() as connection:
            connection.execute(
                statement.on_conflict_do_update(
                    index_elements=["namespace", "name"], set_={"seen_at": statement.excluded.seen_at}
                )
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


def _state(row: Mapping[Any, Any]) -> EntryState:
    return EntryState(
        name=row["name"],
        definition=row["definition"],
        last_run_at=row["last_run_at"],
        next_run_at=row["next_run_at"],
        total_run_count=row["total_run_count"],
        taken_until=row["taken_until"],
        seen_at=row["seen_at"],
    )
