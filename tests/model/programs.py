"""What tasks of the model do: a list of durable calls, and how they end."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from celery_durable.records import Delivery, Kind, Message, OutcomeKind, Outgoing, Status

TASK = "model.task"
#: How an end of each kind is stored once it is told.
STATUS_OF = {
    OutcomeKind.VALUE: Status.SUCCEEDED,
    OutcomeKind.EXCEPTION: Status.FAILED,
    OutcomeKind.CANCELLED: Status.CANCELLED,
    OutcomeKind.EXPIRED: Status.CANCELLED,
    OutcomeKind.QUARANTINED: Status.QUARANTINED,
    OutcomeKind.IGNORED: Status.SUCCEEDED,
}


@dataclass(frozen=True)
class Call:
    """A durable call. ``parks``: a sleep that gives the slot up, for so many seconds."""

    kind: str
    seconds: float = 0.0
    parks: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} {self.seconds:g}"


STEP = Call(Kind.STEP)
NAP = Call(Kind.SLEEP, 0.5)
SLEEP = Call(Kind.SLEEP, 30.0, parks=True)
LONG_SLEEP = Call(Kind.SLEEP, 5000.0, parks=True)


@dataclass(frozen=True)
class Program:
    """The body of a task.

    ``retries``: how often it is retried at its end, with ``restarts`` each time with a new journal.
    ``replaces``: instead of an end of its own it hands its id on, that many times.
    """

    calls: tuple[Call, ...] = ()
    outcome: str = OutcomeKind.VALUE
    retries: int = 0
    restarts: bool = False
    replaces: int = 0
    followers: tuple[str, ...] = ()


def message_for(task_id: str, nesting: int = 0) -> Message:
    return Message(
        headers=json.dumps({"id": task_id, "nesting": nesting}),
        properties="{}",
        body=b"[]",
        content_type="application/json",
        content_encoding="utf-8",
        compression=None,
        exchange="",
        routing_key="celery",
    )


def first_delivery(task_id: str, send_id: str, *, nesting: int = 0) -> Delivery:
    """The message of a send, as it arrives."""
    return Delivery(
        task_id=task_id,
        task_name=TASK,
        send_id=send_id,
        version=0,
        nesting=nesting,
        is_wake=False,
        eta=None,
        expires=None,
        message=message_for(task_id, nesting),
    )


def wake_of(outgoing: Outgoing) -> Delivery:
    """The message that was sent from a row, as it arrives."""
    headers = json.loads(outgoing.message.headers)
    return replace(
        first_delivery(headers["id"], outgoing.send_id or "", nesting=headers["nesting"]),
        send_id=outgoing.send_id,
        version=outgoing.message_version,
        is_wake=True,
        message=outgoing.message,
    )
