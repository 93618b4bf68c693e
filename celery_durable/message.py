"""The wire message: captured as it came, and sent again unchanged but for one header of ours.

The body is never decoded here, so nothing is unpickled, re-encoded or grown by a sleep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.utils.json import JSONEncoder, loads

from celery_durable.records import Delivery, Message, Outgoing, Status
from celery_durable.texts import flaw_of_text, shortened

#: Our one header: which send made the message, which version of it this is, which wake brought it.
HEADER = "durable"

#: What the broker or the transport adds on the way. It is added anew at each send.
UNSTORED_PROPERTIES = frozenset(
    {
        "application_headers",
        "body_encoding",
        "content_encoding",
        "content_type",
        "delivery_info",
        "delivery_tag",
        # The broker's own time limit would drop a wake: ``expires`` limits the first start only.
        "expiration",
    }
)
#: Arguments of kombu's publish that say how to publish, not what. A message may not choose them.
MANNER = frozenset(
    {
        "retry",
        "retry_policy",
        "declare",
        "timeout",
        "confirm_timeout",
        "mandatory",
        "immediate",
        "serializer",
    }
)
#: The largest whole number that a column of ours holds.
_LARGEST = 2**31 - 1
#: By this kombu knows an object that stands for what is not JSON: an instant, bytes.
_MARKER = '"__type__"'
#: As kombu's ``dumps``, which makes an encoder for each call.
dumps = JSONEncoder().encode
_BROKER_HEADERS = re.compile(r"x-(death|first-death-|last-death-|delivery-count|opt-)")
# RabbitMQ's native delayed delivery in Celery puts 28 binary digits before the routing key.
_DELAY_PREFIX = re.compile(r"^(?:[01]\.){28}")


def received(
    message: Any, headers: Mapping[str, Any], *, eta: datetime | None, expires: datetime | None
) -> Delivery:
    """A kombu Message as a delivery that a row can hold.

    Raises ValueError, which says why, where no row can hold it. Whoever can send a message can write
    anything into it: a worker must refuse that one and go on.
    """
    try:
        delivery = delivery_of(headers, capture(message), eta=eta, expires=expires)
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"its headers or properties cannot be kept: {error!r:.200}") from error
    for name in ("content_type", "content_encoding", "compression", "exchange", "routing_key"):
        value = getattr(delivery.message, name)
        flaw = None if value is None else flaw_of_text(value)
        if flaw is not None:
            raise ValueError(f"its {name} {shortened(value)} {flaw}")
    return delivery


def capture(message: Any) -> Message:
    """A message as a worker received it (a kombu Message)."""
    headers = {
        name: value
        for name, value in message.headers.items()
        # kombu has decompressed the body already and leaves the header standing.
        if name not in (HEADER, "compression") and not _BROKER_HEADERS.match(name)
    }
    properties = {
        name: value
        for name, value in (message.properties or {}).items()
        if name not in UNSTORED_PROPERTIES and name not in MANNER
    }
    info = message.delivery_info or {}
    return Message(
        headers=dumps(headers),
        properties=dumps(properties),
        body=as_bytes(message.body, message.content_encoding),
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        compression=message.headers.get("compression"),
        exchange=info.get("exchange") or "",
        routing_key=_DELAY_PREFIX.sub("", info.get("routing_key") or ""),
    )


def as_bytes(body: Any, encoding: str | None) -> bytes:
    """A body as it goes over the wire."""
    if isinstance(body, str):
        return body.encode(encoding if encoding not in (None, "binary") else "utf-8")
    return bytes(body)


def mark_send(
    headers: Mapping[str, Any] | None, send_id: str, *, predecessor: int | None = None
) -> dict[str, Any]:
    """Headers with the mark of a new send, which tells a copy from another send of the same id.

    ``predecessor``: the token of the run that hands its id on with it.
    """
    mark: dict[str, Any] = {"send_id": send_id}
    if predecessor is not None:
        mark["predecessor"] = predecessor
    return {**(headers or {}), HEADER: mark}


def mark_of(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Our header as it stands in a message; empty where it is missing or not ours."""
    mark = headers.get(HEADER)
    return dict(mark) if isinstance(mark, Mapping) else {}


def delivery_of(
    headers: Mapping[str, Any], message: Message, *, eta: datetime | None, expires: datetime | None
) -> Delivery:
    """What the claim has to know about a message that arrived."""
    mark = mark_of(headers)
    send_id = mark.get("send_id")
    return Delivery(
        task_id=headers["id"],
        task_name=headers["task"],
        send_id=send_id if flaw_of_text(send_id) is None else None,
        version=_count(mark.get("version")),
        nesting=_count(headers.get("replaced_task_nesting")),
        is_wake=mark.get("wake") is not None,
        eta=eta,
        expires=expires,
        message=message,
        predecessor=_count(mark.get("predecessor")) or None,
    )


def wakes_of(headers: Mapping[str, Any]) -> int:
    """Which wake of its wait a message is; 0: it is none."""
    return _count(mark_of(headers).get("wake"))


def _count(value: Any) -> int:
    """A count in a header; what is none counts as nothing."""
    return value if type(value) is int and 0 <= value <= _LARGEST else 0


def delivery_from_headers(app: Any, headers: Mapping[str, Any], message: Message) -> Delivery:
    """What a claim would have to know about a message that was built here."""
    expires = instant_of_header(app, headers.get("expires"))
    return delivery_of(headers, message, eta=None, expires=expires)


def instant_of_header(app: Any, value: Any) -> datetime | None:
    """The instant of an ``eta`` or ``expires`` header, read as Celery's worker reads it.

    In UTC: what lies outside of the calendar there (OverflowError) cannot be kept either.
    """
    instant = maybe_iso8601(value) if value else None
    return None if instant is None else maybe_make_aware(instant, app.timezone).astimezone(timezone.utc)


def publish_arguments(outgoing: Outgoing) -> dict[str, Any]:
    """The arguments of kombu's ``Producer.publish`` that send a row's message as it was first sent.

    Raises ValueError where the stored headers or properties cannot be read.
    """
    message = outgoing.message
    try:
        headers, properties = _loads(message.headers), _loads(message.properties)
    except Exception as error:
        # kombu's decoder makes objects of what it finds, and each kind has errors of its own.
        raise ValueError(f"its headers or properties cannot be read: {error!r:.200}") from error
    if not isinstance(headers, dict) or not isinstance(properties, dict):
        raise ValueError("headers and properties must be JSON objects")
    if outgoing.status != Status.OUTBOX:
        headers[HEADER] = {
            "send_id": outgoing.send_id,
            "version": outgoing.message_version,
            "wake": outgoing.sends,
        }
    return {
        **{name: value for name, value in properties.items() if name not in MANNER},
        "body": message.body,
        "content_type": message.content_type or "application/data",
        "content_encoding": message.content_encoding or "binary",
        "compression": message.compression,
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "headers": headers,
    }


def headers_of(text: str) -> dict[str, Any]:
    """The headers of a stored message, for whoever looks at it; none where they cannot be read."""
    try:
        headers = _loads(text)
    except Exception:  # noqa: BLE001 - as above
        return {}
    return headers if isinstance(headers, dict) else {}


def _loads(text: str) -> Any:
    # kombu's decoder calls back for every object, which takes ten times as long. Its markers are rare.
    return loads(text) if _MARKER in text else json.loads(text)
