"""Messages that are written with something else, in one transaction, and sent after it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import Connection, select

from celery_durable.records import Due, Ended, Follower, Outgoing, Refusal, Status
from celery_durable.rules import DISPATCH_LEASE
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


def begin_all(
    connection: Connection, context: Context, claims: Claims, followers: Sequence[Follower], now: datetime
) -> Ended:
    """Write messages that whoever writes them sends right after the commit, but for those due later.

    ``now``: the database's. Until they are sent they are taken, as by a scheduler.
    """
    taken_until = now + timedelta(seconds=DISPATCH_LEASE)
    refused: dict[str, Refusal] = {}
    # In one order whoever writes them: two ends with the same followers would lock each other out.
    for follower in sorted(followers, key=lambda item: item.key):
        due, sends = (Due(at=taken_until), 1) if follower.due is None else (follower.due, 0)
        refusal = enqueue(connection, context, claims, follower, due, sends=sends)
        if refusal is not None:
            refused[follower.key] = refusal
    return Ended(
        tuple(
            _outgoing(follower, taken_until)
            for follower in followers
            if follower.due is None and follower.key not in refused
        ),
        tuple((follower, refused[follower.key]) for follower in followers if follower.key in refused),
    )


def _outgoing(follower: Follower, taken_until: datetime) -> Outgoing:
    delivery = follower.delivery
    return Outgoing(
        key=follower.key,
        status=Status.SCHEDULED if follower.is_durable else Status.OUTBOX,
        task_name=delivery.task_name,
        send_id=delivery.send_id,
        message_version=delivery.version,
        sends=1,
        taken_until=taken_until,
        message=delivery.message,
    )


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

    def begin(self, message: Follower) -> Ended:
        """Write one message that the caller sends right after: what it does not send, a scheduler does."""
        with self._context.database.transaction() as connection:
            now = connection.execute(select(self._context.now())).scalar_one()
            ended = begin_all(connection, self._context, self._claims, [message], now)
        if message.due is not None:
            self._context.nearer(message.due)
        return ended
