"""Rows by the thousand, written in one statement each."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import String, cast, func, insert, literal, select

from celery_durable.records import Kind, Status
from celery_durable.store import Store
from celery_durable.store.dialect import UtcDateTime, shifted

HEADERS = '{"task": "proj.tasks.onboard", "lang": "py", "argsrepr": "(7,)", "kwargsrepr": "{}"}'
BODY = b'[[7], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'


def fill_asleep(
    store: Store,
    count: int,
    due_at: datetime,
    *,
    prefix: str = "sleeper",
    task_name: str = "proj.tasks.onboard",
    spread: float = 60.0,
) -> None:
    """Write ``count`` sleeping executions, due ``spread`` seconds one after the other from ``due_at``.

    Each has a step and its open sleep in the journal. Their ids are ``<prefix>-0000001`` and so on.
    """
    executions, journal = store.context.schema.executions, store.context.schema.journal
    numbers = select(literal(1).label("i")).cte("numbers", recursive=True)
    numbers = numbers.union_all(select(numbers.c.i + 1).where(numbers.c.i < count))
    digits = cast(numbers.c.i + 10_000_000, String)
    task_id = literal(f"{prefix}-") + func.substr(digits, 2)
    first = literal(due_at - timedelta(seconds=spread), UtcDateTime())
    due = shifted(first, numbers.c.i * spread)
    now = store.context.now()
    namespace = literal(store.context.namespace)
    execution = {
        "namespace": namespace,
        "task_id": task_id,
        "task_name": literal(task_name),
        "status": literal(Status.SLEEPING),
        "token": literal(1),
        "wake_at": due,
        "headers": literal(HEADERS),
        "properties": literal("{}"),
        "body": literal(BODY),
        "content_type": literal("application/json"),
        "content_encoding": literal("utf-8"),
        "exchange": literal(""),
        "routing_key": literal("celery"),
        "created_at": now,
        "updated_at": now,
    }
    entry = {
        "namespace": namespace,
        "task_id": task_id,
        "timer_id": literal("00000000-0000-0000-0000-000000000000"),
        "recorded_at": now,
    }
    step = {
        "position": literal(1),
        "kind": literal(Kind.STEP),
        "name": literal("send_welcome"),
        "payload": literal(b"null"),
        "content_type": literal("application/json"),
        "content_encoding": literal("utf-8"),
    }
    sleep = {"position": literal(2), "kind": literal(Kind.SLEEP), "name": literal("trial"), "due_at": due}
    with store.database.transaction() as connection:
        for table, columns in ((executions, execution), (journal, entry | step), (journal, entry | sleep)):
            values = select(*columns.values()).select_from(numbers)
            connection.execute(insert(table).from_select(list(columns), values))
