"""What the layers hand to one another: frozen records, no behaviour beyond questions."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any


class Status:
    """The states of an execution, as stored."""

    SCHEDULED = "scheduled"
    SLEEPING = "sleeping"
    RETRYING = "retrying"
    RUNNING = "running"
    ENDING = "ending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REPLACED = "replaced"
    QUARANTINED = "quarantined"
    #: Not an execution: the message of a plain task that only has to be sent.
    OUTBOX = "outbox"

    LIVE = frozenset({SCHEDULED, SLEEPING, RETRYING, RUNNING, ENDING})
    ENDED = frozenset({SUCCEEDED, FAILED, CANCELLED, REPLACED, QUARANTINED})
    #: Parked: nobody runs it, its due time wakes it.
    PARKED = frozenset({SCHEDULED, SLEEPING, RETRYING})


class Kind:
    """The kinds of a journal entry."""

    SLEEP = "sleep"
    STEP = "step"
    ERROR = "error"


class OutcomeKind:
    """How an execution came to its end."""

    VALUE = "value"
    EXCEPTION = "exception"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    QUARANTINED = "quarantined"
    #: The body itself raised ``Ignore`` or ``Reject``: nobody is told anything.
    IGNORED = "ignored"

    ALL = frozenset({VALUE, EXCEPTION, CANCELLED, EXPIRED, QUARANTINED, IGNORED})
    #: Never stored: what is shown of an outcome that cannot be read.
    UNREADABLE = "unreadable"


class _PickledAsCall:
    """A record that goes to the pool with each job: by itself, one with slots is pickled by reflection."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class Message(_PickledAsCall):
    """A task message as it lies on the wire; the body is never decoded.

    ``headers`` and ``properties`` are JSON texts, so that the store need not know what is in them.
    """

    headers: str
    properties: str
    body: bytes
    content_type: str | None
    content_encoding: str | None
    compression: str | None
    exchange: str
    routing_key: str


@dataclass(frozen=True, slots=True)
class Delivery(_PickledAsCall):
    """One arrival of a message at a worker, with what the claim has to know about it."""

    task_id: str
    task_name: str
    #: Which send made the message; None when the producer does not know this extension.
    send_id: str | None
    #: How often a retry has replaced the message (0: as first sent).
    version: int
    #: Celery's ``replaced_task_nesting``.
    nesting: int
    #: True for a message that was sent from a row.
    is_wake: bool
    eta: datetime | None
    expires: datetime | None
    message: Message
    #: The token of the run that handed its id on with it (``replace``); None: none did, or it is not known.
    predecessor: int | None = None


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """The fence: every write names all three."""

    task_id: str
    owner: str
    token: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The journaled end of an execution.

    ``payload`` is the encoded value or exception (None where nobody gets it), ``reason`` a text for people.
    ``refusals`` counts how often the result store has not taken it.
    """

    kind: str
    reason: str | None = None
    payload: bytes | None = None
    content_type: str | None = None
    content_encoding: str | None = None
    refusals: int = 0


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One durable call of an execution, as journaled."""

    position: int
    kind: str
    name: str
    timer_id: str | None = None
    due_at: datetime | None = None
    #: For a sleep: whether its due time had passed, by the database's clock, when it was read.
    is_over: bool = False
    payload: bytes | None = None
    content_type: str | None = None
    content_encoding: str | None = None
    #: When it was written; None for one that is only about to be.
    recorded_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """When something is to happen: at an instant, or some seconds after the database's now."""

    at: datetime | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """An execution as a claim, a verdict or a take sees it, with the database's time of the reading."""

    task_id: str
    task_name: str
    status: str
    token: int
    owner: str | None
    wake_at: datetime | None
    sends: int
    message_version: int
    nesting: int
    send_id: str | None
    crashes: int
    draining: bool
    outcome: Outcome | None
    has_message: bool
    now: datetime
    #: The sends that used this id before ``send_id``, oldest first.
    past_sends: tuple[str, ...] = ()

    @property
    def is_live(self) -> bool:
        return self.status in Status.LIVE

    @property
    def is_due(self) -> bool:
        return self.wake_at is not None and self.wake_at <= self.now

    @property
    def lease_expired(self) -> bool:
        return self.owner is not None and self.is_due


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim that was granted hands to the run."""

    key: LeaseKey
    status: str
    #: Set when the execution has come to its end already: tell it, do not run the body.
    outcome: Outcome | None
    journal: tuple[JournalEntry, ...]
    crashes: int
    #: True when this claim took the execution over from an owner whose lease had run out.
    recovered: bool
    claimed_at: datetime
    #: The monotonic instant at which the claim was sent: the lease is at least its ttl long from there.
    asked_at: float
    #: The status in which the claim found the execution; None where there was none.
    found: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A claim that was not granted. ``is_fresh_send``: another send used the id of a live task."""

    reason: str
    is_fresh_send: bool = False


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A delivery that became (or is) a row to be sent later: nothing runs now."""

    due_at: datetime | None


@dataclass(frozen=True, slots=True)
class Follower:
    """A message that is written with an outcome, to be sent after it.

    ``is_durable`` says whether it is an execution of its own (a row with the task's id) or a plain
    task's message, which only waits in the outbox under ``key``.
    """

    key: str
    is_durable: bool
    delivery: Delivery
    #: When to send it; None: at once.
    due: Due | None = None


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A row taken for dispatch: what to publish, and what the statements after it must still find."""

    key: str
    status: str
    task_name: str
    send_id: str | None
    message_version: int
    sends: int
    #: ``wake_at`` as the take wrote it: the fence of the statements that follow the publish.
    taken_until: datetime
    message: Message
    #: How often in a row the broker has not confirmed it, before this time.
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """What an accepted end leaves to do: followers to send now, and those whose id was taken."""

    outgoing: tuple[Outgoing, ...]
    refused: tuple[tuple[Follower, Refusal], ...]


@dataclass(frozen=True, slots=True)
class Execution:
    """A read-only view of one execution, for people and tools.

    A list has no ``outcome``, ``message`` and ``journal``: ask for the one execution to see them.
    """

    task_id: str
    task_name: str
    status: str
    wake_at: datetime | None
    owner: str | None
    token: int
    sends: int
    crashes: int
    outcome: Outcome | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    message: Message | None = None
    journal: tuple[JournalEntry, ...] = ()

    @property
    def due_at(self) -> datetime | None:
        """When it goes on: of a sleep its own time, also once a wake message is on its way."""
        if self.owner is not None:
            return None
        last = self.journal[-1] if self.journal else None
        if self.status == Status.SLEEPING and last is not None and last.kind == Kind.SLEEP:
            return last.due_at
        return self.wake_at
