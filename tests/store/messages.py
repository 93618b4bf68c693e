"""Messages and deliveries for tests of the store."""

from __future__ import annotations

import json
import uuid
from typing import Any

from sqlalchemy import select, update

from celery_durable.records import Delivery, Due, Follower, Message, Outgoing
from celery_durable.store import Store
from celery_durable.store.outbox import enqueue

TASK = "proj.tasks.onboard"


def message(task_id: str, *, exchange: str = "", routing_key: str = "celery") -> Message:
    """A task message without arguments."""
    return Message(
        headers=json.dumps({"id": task_id, "task": TASK, "lang": "py"}),
        properties=json.dumps({"correlation_id": task_id, "priority": 0, "delivery_mode": 2}),
        body=b'[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]',
        content_type="application/json",
        content_encoding="utf-8",
        compression=None,
        exchange=exchange,
        routing_key=routing_key,
    )


def delivery(task_id: str, *, send_id: str | None = None, is_wake: bool = False) -> Delivery:
    """The arrival of such a message."""
    return Delivery(
        task_id=task_id,
        task_name=TASK,
        send_id=send_id or f"send-{task_id}",
        version=0,
        nesting=0,
        is_wake=is_wake,
        eta=None,
        expires=None,
        message=message(task_id),
    )


def follower(
    task_id: str, *, is_durable: bool, due: Due | None = None, send_id: str | None = None
) -> Follower:
    """A message to be written with something else."""
    key = task_id if is_durable else str(uuid.uuid4())
    arrival = delivery(task_id, send_id=send_id)
    return Follower(key=key, is_durable=is_durable, delivery=arrival, due=due)


def schedule(store: Store, *task_ids: str, due_in: float = 0.0) -> None:
    """Write executions that are due in so many seconds."""
    for task_id in task_ids:
        refusal = store.claims.schedule(delivery(task_id), Due(seconds=due_in))
        assert refusal is None, refusal


def put_into_outbox(store: Store, *task_ids: str, due_in: float = 0.0) -> None:
    """Write messages of plain tasks."""
    with store.database.transaction() as connection:
        for task_id in task_ids:
            plain = follower(task_id, is_durable=False)
            enqueue(connection, store.context, store.claims, plain, Due(seconds=due_in))


def take(store: Store, limit: int = 100) -> tuple[Outgoing, ...]:
    """What a scheduler takes to be sent."""
    return store.due.take(limit, lambda _name: (3, 60.0)).outgoing


def keys(outgoing: tuple[Outgoing, ...]) -> list[str]:
    return [item.key for item in outgoing]


def columns(store: Store, task_id: str) -> Any:
    """A row as it is stored; None where there is none."""
    executions = store.context.schema.executions
    with store.database.statements() as connection:
        return connection.execute(
            select(executions).where(store.context.mine(executions, task_id))
        ).one_or_none()


def due_in(store: Store, task_id: str) -> float:
    """Seconds until a row is due."""
    seconds: float = (columns(store, task_id).wake_at - store.now()).total_seconds()
    return seconds


def edit(store: Store, task_id: str, **values: Any) -> None:
    """Write into a row past all rules, as an operator with a SQL prompt could."""
    executions = store.context.schema.executions
    with store.database.statements() as connection:
        connection.execute(update(executions).where(store.context.mine(executions, task_id)).values(**values))


def count_rows(store: Store) -> int:
    """How many rows there are, those of plain tasks included."""
    executions = store.context.schema.executions
    with store.database.statements() as connection:
        return len(connection.execute(select(executions.c.task_id)).all())
