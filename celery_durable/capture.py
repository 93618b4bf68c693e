"""Catching what Celery is about to publish, so that it can become a row instead.

Celery's own code builds the message (routing, stamps, signals, canvases); only its last act, the publish,
goes to us. There is one place that all it sends runs through: ``app.amqp.send_task_message``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from celery.app.amqp import AMQP
from kombu.common import Broadcast
from kombu.serialization import dumps as serialize
from kombu.utils.json import loads
from kombu.utils.objects import cached_property
from kombu.utils.uuid import uuid

from celery_durable.errors import ConfigurationError
from celery_durable.message import (
    HEADER,
    MANNER,
    UNSTORED_PROPERTIES,
    as_bytes,
    dumps,
    mark_of,
    mark_send,
)
from celery_durable.records import Due, Message
from celery_durable.texts import flaw_of_message

#: Where captured messages go while Celery is made to publish into our hands.
_captured: ContextVar[list[Captured] | None] = ContextVar("celery_durable_captured", default=None)


@dataclass(frozen=True, slots=True)
class Captured:
    """One message that Celery would have published; ``headers`` with our mark still on them."""

    task_name: str
    headers: Mapping[str, Any]
    message: Message
    #: When to send it; None: at once.
    due: Due | None = None


def is_capturing() -> bool:
    """Whether what Celery sends here and now is being caught."""
    return _captured.get() is not None


@contextmanager
def capturing() -> Iterator[list[Captured]]:
    """Within this block, of this thread or greenlet, nothing that Celery sends reaches the broker."""
    caught: list[Captured] = []
    token = _captured.set(caught)
    try:
        yield caught
    finally:
        _captured.reset(token)


@contextmanager
def due_at(due: Due) -> Iterator[None]:
    """Within this block, what is caught is to be sent when it is due."""
    caught = _captured.get()
    assert caught is not None
    before = len(caught)
    yield
    caught[before:] = [replace(item, due=due) for item in caught[before:]]


def under_parent(captured: Captured, parent_id: str | None) -> Captured:
    """The same message under another parent: a task that is retried is no child of itself."""
    headers = {**captured.headers, "parent_id": parent_id}
    stored = dumps({**loads(captured.message.headers), "parent_id": parent_id})
    return replace(captured, headers=headers, message=replace(captured.message, headers=stored))


class CapturingProducer:
    """Takes the place of the kombu producer in Celery's ``send_task_message``."""

    def __init__(self, name: str, caught: list[Captured]) -> None:
        self._name = name
        self._caught = caught

    def publish(
        self,
        body: Any,
        *,
        exchange: Any = "",
        routing_key: str = "",
        serializer: str | None = None,
        compression: str | None = None,
        headers: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        content_type, content_encoding, data = serialize(body, serializer=serializer)
        headers = dict(headers or {})
        properties = {
            name: getattr(value, "name", value)
            for name, value in options.items()
            if name not in UNSTORED_PROPERTIES and name not in MANNER and value is not None
        }
        message = Message(
            headers=dumps({name: value for name, value in headers.items() if name != HEADER}),
            properties=dumps(properties),
            body=as_bytes(data, content_encoding),
            content_type=content_type,
            content_encoding=content_encoding,
            compression=compression,
            exchange=getattr(exchange, "name", exchange) or "",
            routing_key=routing_key or "",
        )
        self._caught.append(Captured(self._name, headers, message))


class _SilentDispatcher:
    """``task-sent`` tells of a message that went to the broker: a captured one did not."""

    def publish(self, *_: Any, **__: Any) -> None:
        return None


def is_durable(app: Any, task_name: str) -> bool:
    """Whether the app knows a durable task of this name."""
    return bool(getattr(app.tasks.get(task_name), "is_durable", False))


def _check(task_name: str, message: Any) -> None:
    """Refuse, where it is sent, what no row could be made of."""
    flaw = flaw_of_message(message.headers.get("id"), task_name)
    if flaw is not None:
        raise ValueError(flaw)


def _marked(message: Any) -> Any:
    """With the mark of a new send, unless it has one: a chord's body has, and the successor of a task."""
    if mark_of(message.headers):
        return message
    return message._replace(headers=mark_send(message.headers, uuid()))


class DurableAMQP(AMQP):
    """Celery's AMQP api, with an ear in it."""

    @cached_property
    def send_task_message(self) -> Any:
        send = super().send_task_message

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            if is_durable(self.app, name):
                if isinstance(options.get("queue"), Broadcast):
                    raise ConfigurationError(
                        f"durable task {name} cannot be sent to a broadcast queue: it has one owner at a time"
                    )
                _check(name, message)
                message = _marked(message)
                # The broker's own time limit: it would drop the message, and nobody would hear of that.
                options.pop("expiration", None)
            caught = _captured.get()
            if caught is None:
                return send(producer, name, message, **options)
            _check(name, message)
            options |= {"event_dispatcher": _SilentDispatcher(), "retry": False}
            # What a receiver of its signals (``before_task_publish``) sends is a message of its own.
            token = _captured.set(None)
            try:
                return send(CapturingProducer(name, caught), name, message, **options)
            finally:
                _captured.reset(token)

        return send_task_message
