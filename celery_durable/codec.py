"""Journaled values and exceptions: to bytes and back, in a serializer of kombu's."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery.utils.serialization import create_exception_cls
from kombu.exceptions import EncodeError
from kombu.serialization import dumps, loads, prepare_accept_content

from celery_durable.errors import PayloadTooLarge, StepFailed

#: Serializers that can only make plain values: what was written by them is read even when another one
#: has been configured since, so that a changed setting strands no task that has slept for a month.
HARMLESS = ("json", "msgpack")
#: Characters that are kept of the message of an exception.
MESSAGE_LENGTH = 10_000
#: Bytes that an exception may take whatever the limit is, so that an error that tells of a low limit is not
#: itself over it.
EXCEPTION_ROOM = 65_536


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded value."""

    data: bytes
    content_type: str
    content_encoding: str


class Codec:
    """Encodes what is journaled.

    ``serializer`` is the name of a kombu serializer, ``limit`` the most bytes of one value (None: any).
    """

    def __init__(self, serializer: str, limit: int | None = None) -> None:
        self._serializer = serializer
        self._limit = limit
        # Rows are our own writing, but whoever can write to the database must not choose a decoder that
        # runs code.
        self._accept = prepare_accept_content({serializer, *HARMLESS})

    def encode(self, value: Any) -> Payload:
        """Encode a value.

        Raises:
            kombu.exceptions.EncodeError: the serializer cannot.
            PayloadTooLarge: more bytes than the limit.
        """
        return self._within(self._limit, value)

    def _within(self, limit: int | None, value: Any) -> Payload:
        payload = self._dump(value)
        if limit is not None and len(payload.data) > limit:
            raise PayloadTooLarge(len(payload.data), limit)
        return payload

    def _dump(self, value: Any) -> Payload:
        data: str | bytes
        try:
            content_type, content_encoding, data = dumps(value, serializer=self._serializer)
        except EncodeError as error:
            # kombu's carries the serializer's own exception, and so could not be journaled itself.
            raise EncodeError(str(error)) from error
        encoded = data.encode(content_encoding) if isinstance(data, str) else data
        return Payload(encoded, content_type, content_encoding)

    def decode(self, data: bytes | None, content_type: str | None, encoding: str | None) -> Any:
        """The value of encoded bytes.

        Raises:
            kombu.exceptions.ContentDisallowed: written by a serializer that is neither ours nor harmless.
            kombu.exceptions.DecodeError: the bytes cannot be read.
        """
        if data is None:
            return None
        return loads(data, content_type or "", encoding or "", accept=self._accept)

    def encode_exception(self, error: BaseException) -> tuple[Payload, BaseException]:
        """Encode an exception. Returns also what every replay will raise, which is what to raise now.

        That is the exception itself where it can be rebuilt from its type, arguments and attributes; the
        same without the attributes that no serializer takes; else a stand-in.
        """
        limit = None if self._limit is None else max(self._limit, EXCEPTION_ROOM)
        poorer: tuple[Payload, BaseException] | None = None
        for attributes in ({}, dict(vars(error))):
            try:
                payload = self._within(limit, _described(error, list(error.args), attributes))
                rebuilt = self.decode_exception(payload.data, payload.content_type, payload.content_encoding)
                if not _is_alike(rebuilt, error):
                    break
                if vars(rebuilt) == vars(error):
                    return payload, error
                poorer = poorer or (payload, rebuilt)
            except Exception:  # noqa: BLE001 - arguments that no serializer takes are the case at hand
                break
        if poorer is not None:
            return poorer
        described = _described(error, None, {})
        return self._dump(described), self._stand_in(described)

    def decode_exception(
        self, data: bytes | None, content_type: str | None, encoding: str | None
    ) -> BaseException:
        """The exception that was encoded, or a stand-in where it cannot be rebuilt."""
        described = self.decode(data, content_type, encoding)
        return _rebuilt(described) or self._stand_in(described)

    def _stand_in(self, described: Mapping[str, Any]) -> BaseException:
        """What is raised for an exception that cannot be rebuilt."""
        return StepFailed(described["type"], described["message"])


class OutcomeCodec(Codec):
    """Encodes what a task came to: no limit binds it, and it shows as Celery would show it."""

    def _stand_in(self, described: Mapping[str, Any]) -> BaseException:
        # As a result backend does: a class of that name, made for the purpose.
        made: type[BaseException] = create_exception_cls(described["type"], described["module"])
        return made(described["message"])


def _described(error: BaseException, args: list[Any] | None, attributes: dict[str, Any]) -> dict[str, Any]:
    kind = type(error)
    return {
        "module": kind.__module__,
        "type": kind.__qualname__,
        "message": _text_of(error),
        "args": args,
        "attributes": attributes,
    }


def _text_of(error: BaseException) -> str:
    try:
        return str(error)[:MESSAGE_LENGTH]
    except Exception as failure:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"its text cannot be shown ({type(failure).__name__})"


def _rebuilt(described: Mapping[str, Any]) -> BaseException | None:
    """The exception itself; None where its class is gone, or takes other arguments."""
    if described["args"] is None:
        return None
    try:
        found: Any = importlib.import_module(described["module"])
        for name in described["type"].split("."):
            found = getattr(found, name)
        # Nothing but an exception is ever called here.
        if not (isinstance(found, type) and issubclass(found, Exception)):
            return None
        error = found(*described["args"])
        vars(error).update(described.get("attributes") or {})
    except Exception:  # noqa: BLE001 - whatever a class or its module does: it cannot be rebuilt
        return None
    return error


def _is_alike(rebuilt: BaseException, error: BaseException) -> bool:
    return type(rebuilt) is type(error) and str(rebuilt) == str(error) and rebuilt.args == error.args
