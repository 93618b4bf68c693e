"""The tables. Their shape is what the migrations produce; a test holds the two together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    and_,
    text,
)

from celery_durable.store.dialect import UtcDateTime
from celery_durable.texts import ID_LENGTH


@dataclass(frozen=True)
class Schema:
    """The tables under one prefix."""

    metadata: MetaData
    executions: Table
    journal: Table
    schedule: Table
    version_table: str


@lru_cache(maxsize=8)
def schema_for(prefix: str, schema: str | None) -> Schema:
    """The tables of a prefix in a database schema (None: the connection's own)."""
    metadata = MetaData(schema=schema)
    return Schema(
        metadata=metadata,
        executions=_executions(metadata, prefix),
        journal=_journal(metadata, prefix),
        schedule=_schedule(metadata, prefix),
        version_table=f"{prefix}version",
    )


def _executions(metadata: MetaData, prefix: str) -> Table:
    table = Table(
        f"{prefix}executions",
        metadata,
        Column("namespace", String(ID_LENGTH), primary_key=True),
        Column("task_id", String(ID_LENGTH), primary_key=True),
        Column("task_name", Text, nullable=False),
        Column("status", String(16), nullable=False),
        Column("token", BigInteger, nullable=False, server_default=text("0")),
        Column("owner", Text),
        Column("wake_at", UtcDateTime),
        Column("sends", Integer, nullable=False, server_default=text("0")),
        Column("message_version", Integer, nullable=False, server_default=text("0")),
        Column("nesting", Integer, nullable=False, server_default=text("0")),
        Column("send_id", Text),
        Column("crashes", Integer, nullable=False, server_default=text("0")),
        Column("draining", Boolean, nullable=False, server_default=text("false")),
        Column("outcome", Text),
        Column("headers", Text),
        Column("properties", Text),
        Column("body", LargeBinary),
        Column("content_type", Text),
        Column("content_encoding", Text),
        Column("compression", Text),
        Column("exchange", Text),
        Column("routing_key", Text),
        Column("created_at", UtcDateTime, nullable=False),
        Column("updated_at", UtcDateTime, nullable=False),
        Column("finished_at", UtcDateTime),
        # Publishes of the wake at hand that the broker did not confirm, in a row.
        Column("failures", Integer, nullable=False, server_default=text("0")),
        # The sends before this one that used the same id, a JSON list: their copies may still come.
        Column("past_sends", Text),
    )
    # The heap of the scheduler: only what waits for something is in it.
    waiting = table.c.wake_at.is_not(None)
    Index(
        f"{prefix}executions_due",
        table.c.namespace,
        table.c.wake_at,
        postgresql_where=waiting,
        sqlite_where=waiting,
    )
    # What can be pruned, and apart from it what has been: there are many more of these, kept for longer.
    finished = table.c.finished_at.is_not(None)
    for name, where in (
        ("finished", and_(finished, table.c.body.is_not(None))),
        ("tombstones", and_(finished, table.c.body.is_(None))),
    ):
        Index(
            f"{prefix}executions_{name}",
            table.c.namespace,
            table.c.finished_at,
            postgresql_where=where,
            sqlite_where=where,
        )
    return table


def _journal(metadata: MetaData, prefix: str) -> Table:
    return Table(
        f"{prefix}journal",
        metadata,
        Column("namespace", String(ID_LENGTH), primary_key=True),
        Column("task_id", String(ID_LENGTH), primary_key=True),
        Column("position", Integer, primary_key=True, autoincrement=False),
        Column("kind", String(16), nullable=False),
        Column("name", Text, nullable=False),
        Column("timer_id", String(36), nullable=False),
        Column("due_at", UtcDateTime),
        Column("payload", LargeBinary),
        Column("content_type", Text),
        Column("content_encoding", Text),
        Column("recorded_at", UtcDateTime, nullable=False),
    )


def _schedule(metadata: MetaData, prefix: str) -> Table:
    return Table(
        f"{prefix}schedule",
        metadata,
        Column("namespace", String(ID_LENGTH), primary_key=True),
        # One row per beat entry, and one named "" that carries the time of the last tick.
        Column("name", String(ID_LENGTH), primary_key=True),
        Column("definition", Text, nullable=False),
        Column("last_run_at", UtcDateTime),
        Column("next_run_at", UtcDateTime),
        Column("total_run_count", BigInteger, nullable=False, server_default=text("0")),
        # A scheduler is about to run it: nobody else does before this.
        Column("taken_until", UtcDateTime),
        Column("seen_at", UtcDateTime, nullable=False),
    )
