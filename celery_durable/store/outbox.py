"""Messages that are written with something else, in one transaction, and sent after it."""

from __future__ import annotations

from sqlalchemy import Connection

from celery_durable.records import Due, Follower, Refusal, Status
from celery_durable.store.base import Context, message_columns
from celery_durable.store.claims import Claims


def enqueue(
    connection: Connection,
    context: Context,
    claims: Claims,
    follower: Follower,
    due: Due,
    *,
    sends: int = 0,
) -> Refusal | None:
    """Write a message, to be sent when it is due.

    A durable task's becomes its execution, by the rules of a claim. A plain task's becomes a row under a
    key of its own, which is deleted once the broker has the message.
    """
    if follower.is_durable:
        return claims.admit(connection, follower.delivery, due, sends=sends)
    delivery = follower.delivery
    connection.execute(
        context.schema.executions.insert().values(
            namespace=context.namespace,
            task_id=follower.key,
            task_name=delivery.task_name,
            status=Status.OUTBOX,
            wake_at=context.instant(due),
            sends=sends,
            created_at=context.now(),
            updated_at=context.now(),
            **message_columns(delivery.message),
        )
    )
    return None


class Outbox:
    """Statements on messages that are written by themselves."""

    def __init__(self, context: Context, claims: Claims) -> None:
        self._context = context
        self._claims = claims

    def post(self, message: Follower, due: Due) -> None:
        """Write one message of a plain task, to be sent when it is due."""
        with self._context.database.transaction() as connection:
            enqueue(connection, self._context, self._claims, message, due)
        self._context.nearer(due)
