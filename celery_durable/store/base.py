"""What every part of the store shares: the database, the tables, the namespace, rows as records."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ARRAY, ColumnElement, Text, and_, any_, literal

from celery_durable.records import Due, JournalEntry, LeaseKey, Message, Outcome, Row
from celery_durable.store.dialect import MOST_SECONDS, UtcDateTime, now_plus, shifted
from celery_durable.store.engine import Database
from celery_durable.store.notify import Notifier
from celery_durable.store.schema import Schema

MESSAGE_COLUMNS = (
    "headers",
    "properties",
    "body",
    "content_type",
    "content_encoding",
    "compression",
    "exchange",
    "routing_key",
)

_AT_ONCE = Due()


@dataclass(frozen=True)
class Context:
    """One namespace in one database.

    For tests that travel in time: ``time_offset`` (seconds) moves the database's clock, and an instant in
    ``stopped_at`` is where it stands still.
    """

    database: Database
    schema: Schema
    namespace: str
    time_offset: list[float]
    notifier: Notifier | None = None
    stopped_at: list[datetime] = field(default_factory=list)

    def now(self, seconds: float | ColumnElement[float] = 0.0) -> Any:
        """The database's time, plus some seconds."""
        if self.stopped_at:
            return shifted(literal(self.stopped_at[0], UtcDateTime()), seconds)
        if isinstance(seconds, (int, float)):
            return now_plus(literal(min(float(seconds) + self.time_offset[0], MOST_SECONDS)))
        return now_plus(seconds + self.time_offset[0])

    def nearer(self, due: Due = _AT_ONCE) -> None:
        """Hint that a row with this due time was committed. Called outside any transaction."""
        if self.notifier is not None:
            self.notifier.nearer(due)

    def instant(self, due: Due) -> Any:
        """A due time as an expression of the database."""
        return due.at if due.at is not None else self.now(due.seconds)

    def mine(self, table: Any, task_id: Any) -> ColumnElement[bool]:
        """The rows of a task in this namespace."""
        return and_(table.c.namespace == self.namespace, table.c.task_id == task_id)

    def among(self, column: ColumnElement[str], values: Sequence[str]) -> ColumnElement[bool]:
        """The rows whose column is one of many values.

        One parameter where the database has arrays: a hundred of them cost more than the search.
        """
        if self.database.dialect_name == "postgresql":
            return column == any_(literal(list(values), ARRAY(Text)))
        return column.in_(values)

    def fenced(self, key: LeaseKey) -> ColumnElement[bool]:
        """The execution, if the holder of this lease still owns it."""
        executions = self.schema.executions
        return and_(
            self.mine(executions, key.task_id),
            executions.c.owner == key.owner,
            executions.c.token == key.token,
        )


def message_columns(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in MESSAGE_COLUMNS}


def message_of(row: Mapping[Any, Any]) -> Message | None:
    """The stored message; None for a row that has been emptied or never had one."""
    if row["body"] is None:
        return None
    return Message(
        headers=row["headers"] or "{}",
        properties=row["properties"] or "{}",
        body=bytes(row["body"]),
        content_type=row["content_type"],
        content_encoding=row["content_encoding"],
        compression=row["compression"],
        exchange=row["exchange"] or "",
        routing_key=row["routing_key"] or "",
    )


def row_of(row: Mapping[Any, Any], now: datetime) -> Row:
    return Row(
        task_id=row["task_id"],
        task_name=row["task_name"],
        status=row["status"],
        token=row["token"],
        owner=row["owner"],
        wake_at=row["wake_at"],
        sends=row["sends"],
        message_version=row["message_version"],
        nesting=row["nesting"],
        send_id=row["send_id"],
        crashes=row["crashes"],
        draining=bool(row["draining"]),
        outcome=outcome_from_text(row["outcome"]),
        has_message=row["body"] is not None,
        now=now,
    )


def entry_of(row: Mapping[Any, Any]) -> JournalEntry:
    return JournalEntry(
        position=row["position"],
        kind=row["kind"],
        name=row["name"],
        timer_id=row["timer_id"],
        due_at=row["due_at"],
        is_over=bool(row["is_over"]),
        payload=None if row["payload"] is None else bytes(row["payload"]),
        content_type=row["content_type"],
        content_encoding=row["content_encoding"],
        recorded_at=row["recorded_at"],
    )


def outcome_to_text(outcome: Outcome) -> str:
    """The outcome as one JSON text; a payload that is no text is kept in base 64."""
    fields: dict[str, Any] = {"kind": outcome.kind}
    if outcome.reason is not None:
        fields["reason"] = outcome.reason
    if outcome.payload is not None:
        try:
            fields["payload"] = outcome.payload.decode("utf-8")
        except UnicodeDecodeError:
            fields["base64"] = base64.b64encode(outcome.payload).decode("ascii")
        fields["content_type"] = outcome.content_type
        fields["content_encoding"] = outcome.content_encoding
    return json.dumps(fields)


def outcome_from_text(text: str | None) -> Outcome | None:
    if text is None:
        return None
    fields = json.loads(text)
    payload = fields.get("payload")
    if payload is not None:
        payload = payload.encode("utf-8")
    elif "base64" in fields:
        payload = base64.b64decode(fields["base64"])
    return Outcome(
        kind=fields["kind"],
        reason=fields.get("reason"),
        payload=payload,
        content_type=fields.get("content_type"),
        content_encoding=fields.get("content_encoding"),
    )
