"""A test's hand in the tables, past all rules, and the deliveries that tests let in."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy import event, select, update
from sqlalchemy.engine.interfaces import CacheStats

from celery_durable.records import (
    Claim,
    Delivery,
    Due,
    Follower,
    JournalEntry,
    Kind,
    LeaseKey,
    Message,
    Refusal,
    Scheduled,
    Status,
)
from celery_durable.store import Store

OWNER = "celery@one:1:aaaa"
OTHER = "celery@two:2:bbbb"
TTL = 60.0

MESSAGE = Message(
    headers='{"task": "proj.task"}',
    properties='{"correlation_id": "id"}',
    body=b"[[1], {}, {}]\x00\xff",
    content_type="application/json",
    content_encoding="utf-8",
    compression=None,
    exchange="",
    routing_key="celery",
)


def delivery(task_id: str = "id", **changes: Any) -> Delivery:
    """The first message of a task, as a worker gets it."""
    first = Delivery(
        task_id=task_id,
        task_name="proj.task",
        send_id="send-1",
        version=0,
        nesting=0,
        is_wake=False,
        eta=None,
        expires=None,
        message=MESSAGE,
    )
    return replace(first, **changes)


def wake(task_id: str = "id", **changes: Any) -> Delivery:
    """A message that was sent from the row."""
    return delivery(task_id, is_wake=True, **changes)


def step(position: int, name: str = "pay", payload: bytes | None = b"1") -> JournalEntry:
    return JournalEntry(
        position, Kind.STEP, name, payload=payload, content_type="application/json", content_encoding="utf-8"
    )


def sleep(position: int, name: str = "") -> JournalEntry:
    return JournalEntry(position, Kind.SLEEP, name)


def follower(task_id: str, *, durable: bool = True, due: Due | None = None, **changes: Any) -> Follower:
    key = task_id if durable else f"key-of-{task_id}"
    return Follower(key=key, is_durable=durable, delivery=delivery(task_id, **changes), due=due)


def claim(
    store: Store, arrival: Delivery, owner: str = OWNER, *, ttl: float = TTL, max_crashes: int | None = 3
) -> Claim | Refusal | Scheduled:
    return store.claims.claim(arrival, owner, ttl, max_crashes)


def claimed(store: Store, arrival: Delivery | None = None, owner: str = OWNER, **options: Any) -> Claim:
    """A claim that is granted."""
    answer = claim(store, arrival or delivery(), owner, **options)
    assert isinstance(answer, Claim), answer
    return answer


def refused(store: Store, arrival: Delivery, owner: str = OWNER, **options: Any) -> str:
    """The reason of a claim that is not."""
    answer = claim(store, arrival, owner, **options)
    assert isinstance(answer, Refusal), answer
    return answer.reason


def asleep(store: Store, task_id: str = "id", seconds: float = 3_600.0, *entries: JournalEntry) -> LeaseKey:
    """A task that sleeps at its first position, or after ``entries``. Returns the lease that it had."""
    key = claimed(store, delivery(task_id)).key
    position = len(entries) + 1
    assert store.runs.park(key, Due(seconds=seconds), entries=[*entries, sleep(position)])
    return key


class Tables:
    """Reads and writes rows as they are."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._executions = store.context.schema.executions
        self._journal = store.context.schema.journal

    def row(self, task_id: str = "id", namespace: str = "proj") -> dict[str, Any] | None:
        """One execution, all of it."""
        table = self._executions
        with self._store.database.statements() as connection:
            found = connection.execute(
                select(table).where(table.c.namespace == namespace, table.c.task_id == task_id)
            )
            row = found.mappings().one_or_none()
        return None if row is None else dict(row)

    def all(self) -> list[dict[str, Any]]:
        """Every execution of every namespace."""
        table = self._executions
        with self._store.database.statements() as connection:
            found = connection.execute(select(table).order_by(table.c.namespace, table.c.task_id))
            return [dict(row) for row in found.mappings()]

    def journal(self, task_id: str = "id") -> list[dict[str, Any]]:
        """The journal of one execution, in order."""
        table = self._journal
        with self._store.database.statements() as connection:
            found = connection.execute(
                select(table).where(table.c.task_id == task_id).order_by(table.c.position)
            )
            return [dict(row) for row in found.mappings()]

    def everything(self, task_id: str = "id") -> tuple[Any, ...]:
        """What a write that is refused must leave as it was."""
        return self.row(task_id), self.journal(task_id), len(self.all())

    def put(self, task_id: str = "id", **values: Any) -> None:
        """Write columns of one execution."""
        table = self._executions
        with self._store.database.statements() as connection:
            done = connection.execute(update(table).where(table.c.task_id == task_id).values(**values))
            assert done.rowcount == 1

    def expire(self, task_id: str = "id", seconds: float = 0.0) -> datetime:
        """Let the time of a row have come so many seconds ago. Returns that time."""
        instant: datetime = self._store.now() - timedelta(seconds=seconds)
        self.put(task_id, wake_at=instant)
        return instant

    def due_in(self, task_id: str = "id") -> float:
        """Seconds until the time of a row comes, by the database's clock."""
        row = self.row(task_id)
        assert row is not None
        seconds: float = (row["wake_at"] - self._store.now()).total_seconds()
        return seconds

    def send_wake(self, task_id: str = "id") -> None:
        """What a scheduler does to a due row: take it and publish its message."""
        self.put(task_id, owner=None, sends=1, wake_at=self._store.now() + timedelta(seconds=120))


class Statements:
    """Counts what goes over the wire."""

    def __init__(self, store: Store) -> None:
        self.texts: list[str] = []
        #: The statements that SQLAlchemy had to compile.
        self.compiled: list[str] = []
        engine = store.database.engine
        event.listen(engine, "before_cursor_execute", self._note)
        self._execute, store.database.execute = store.database.execute, self._note_and_execute
        event.listen(engine, "begin", self._note_begin)
        event.listen(engine, "commit", lambda connection: self._note_end(connection, "COMMIT"))

    def _note(self, _conn: Any, _cursor: Any, text: str, _params: Any, context: Any, _many: bool) -> None:
        self.texts.append(" ".join(text.split()))
        if context.compiled is not None and context.cache_hit is not CacheStats.CACHE_HIT:
            self.compiled.append(self.texts[-1])

    def _note_and_execute(self, text: str, parameters: Any, **options: Any) -> Any:
        self.texts.append(" ".join(text.split()))
        return self._execute(text, parameters, **options)

    def _note_begin(self, connection: Any) -> None:
        # SQLite's own is an ordinary statement.
        if connection.dialect.name == "postgresql" and not _commits_by_itself(connection):
            self.texts.append("BEGIN")

    def _note_end(self, connection: Any, text: str) -> None:
        if not _commits_by_itself(connection):
            self.texts.append(text)

    def during(self, call: Any) -> list[str]:
        """The first words of the statements of one call."""
        self.texts.clear()
        self.compiled.clear()
        call()
        return [text.split()[0] for text in self.texts]


def _commits_by_itself(connection: Any) -> bool:
    options = connection.get_execution_options()
    return not ("isolation_level" in options or "celery_durable_transaction" in options)


LONG_AGO = datetime(2001, 1, 1, tzinfo=timezone.utc)
LIVE = sorted(Status.LIVE)
