"""Journaled values and exceptions: to bytes and back, in a serializer of kombu's."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kombu.serialization import dumps, loads, registry

from celery_durable.errors import PayloadTooLarge, StepFailed


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded value."""

    data: bytes
    content_type: str
    content_encoding: str


class Codec:
    """Encodes what is journaled.

    ``serializer`` is the name of a kombu serializer, ``limit`` the most bytes of one value.
    """

    def __init__(self, serializer: str, limit: int) -> None:
        self._serializer = serializer
        self._limit = limit
        # Rows are our own writing, but whoever can write to the database must not choose the decoder:
        # only what this codec writes itself is read.
        self._accept = [registry.name_to_type.get(serializer, serializer)]

    def encode(self, value: Any, *, limited: bool = True) -> Payload:
        """Encode a value.

        Raises:
            kombu.exceptions.EncodeError: the serializer cannot.
            PayloadTooLarge: more bytes than the limit (``limited``).
        """
        content_type, content_encoding, data = dumps(value, serializer=self._serializer)
        encoded = data.encode(content_encoding) if isinstance(data, str) else data
        if limited and len(encoded) > self._limit:
            raise PayloadTooLarge(len(encoded), self._limit)
        return Payload(encoded, content_type, content_encoding)

    def decode(self, data: bytes | None, content_type: str | None, encoding: str | None) -> Any:
        """The value of encoded bytes."""
        if data is None:
            return None
        return loads(data, content_type, encoding, accept=self._accept)

    def encode_exception(self, error: BaseException) -> tuple[Payload, BaseException]:
        """Encode an exception. Returns also what every replay will raise, which is what to raise now.

        That is the same exception where it can be rebuilt from its type and arguments, else StepFailed.
        """
        kind = type(error)
        described = {
            "module": kind.__module__,
            "type": kind.__qualname__,
            "message": str(error),
            "args": list(error.args),
        }
        try:
            payload = self.encode(described)
            if _same(self._rebuild(payload), error):
                return payload, error
        except Exception:  # noqa: BLE001 - arguments that no serializer takes are the case at hand
            pass
        described["args"] = None
        described["message"] = str(error)[:10_000]
        replayed = StepFailed(kind.__qualname__, described["message"])
        return self.encode(described), replayed

    def decode_exception(
        self, data: bytes | None, content_type: str | None, encoding: str | None
    ) -> BaseException:
        """The exception that was encoded, or StepFailed where it cannot be rebuilt."""
        return _exception_of(self.decode(data, content_type, encoding))

    def _rebuild(self, payload: Payload) -> BaseException:
        return _exception_of(self.decode(payload.data, payload.content_type, payload.content_encoding))


def _exception_of(described: Mapping[str, Any]) -> BaseException:
    failed = StepFailed(described["type"], described["message"])
    if described["args"] is None:
        return failed
    try:
        found: Any = importlib.import_module(described["module"])
        for name in described["type"].split("."):
            found = getattr(found, name)
        if isinstance(found, type) and issubclass(found, Exception):
            return found(*described["args"])
    except Exception:  # noqa: BLE001 - the class is gone or takes other arguments: say so as StepFailed
        return failed
    return failed


def _same(rebuilt: BaseException, error: BaseException) -> bool:
    return type(rebuilt) is type(error) and str(rebuilt) == str(error) and rebuilt.args == error.args
