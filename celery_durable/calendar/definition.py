"""A fingerprint of a beat entry, to tell one that was changed from one that was not.

It is the same in every process, on every machine, and after every restart: nothing goes into it
that has an address, or an order that is not its own.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from fractions import Fraction
from functools import singledispatch
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast
from uuid import UUID

from celery.beat import BeatLazyFunc
from celery.schedules import BaseSchedule, crontab, maybe_schedule, schedule, solar

from celery_durable.calendar.cron import Pattern
from celery_durable.calendar.occurrence import is_custom, zone_of

# What a schedule keeps beside its definition: the app that it is bound to.
_BINDINGS = frozenset({"_app", "app"})
# Wall times. Between them they show the offsets of every zone that has a summer time.
_WINTER_AND_SUMMER = (datetime(2024, 1, 15), datetime(2024, 7, 15))  # noqa: DTZ001


def definition_hash(
    task: str,
    schedule: BaseSchedule | timedelta | float,
    args: Sequence[object] | None,
    kwargs: Mapping[str, object] | None,
    options: Mapping[str, object] | None,
) -> str:
    """Return 64 hexadecimal digits that change when the entry does.

    Schedules count by what they mean: ``30`` is ``timedelta(seconds=30)``, and minute ``"*/30"``
    is minute ``"0,30"``. A time zone counts where it decides when the entry runs. Lists and
    tuples are alike. Functions, and the one in a ``BeatLazyFunc``, count by their names: an
    edited body goes unnoticed. So does the inside of an object that is none of Python's basic
    values, which counts by its class.

    Take it before the entry is first sent: Celery adds a header to ``options`` in place.
    """
    parts = (task, _bound(schedule), args or (), kwargs or {}, options or {})
    return hashlib.sha256(_as_text([_describe(part) for part in parts]).encode("ascii")).hexdigest()


def _bound(value: BaseSchedule | timedelta | float) -> BaseSchedule:
    # Only for what is no schedule yet: Celery would bind a schedule to the app, or to none.
    if isinstance(value, BaseSchedule):
        return value
    return cast(BaseSchedule, maybe_schedule(cast(Any, value)))


@singledispatch
def _describe(value: object) -> object:
    """Return what JSON can say of a value, with its type where JSON would lose it."""
    return ["object", _name(value.__class__)]


@_describe.register(str)
@_describe.register(bool)
@_describe.register(type(None))
def _(value: object) -> object:
    return value


@_describe.register
def _(value: int) -> object:
    # Python refuses to write an int of more than some thousand digits in decimal.
    return ["int", hex(value)]


@_describe.register
def _(value: float) -> object:
    return ["float", float(value).hex()]


@_describe.register(bytes)
@_describe.register(bytearray)
def _(value: bytes) -> object:
    return ["bytes", value.hex()]


@_describe.register(date)
@_describe.register(time)
@_describe.register(timedelta)
@_describe.register(Decimal)
@_describe.register(Fraction)
@_describe.register(UUID)
def _(value: object) -> object:
    return ["value", _name(value.__class__), str(value)]


@_describe.register
def _(value: enum.Enum) -> object:
    return ["enum", _name(value.__class__), value.name]


@_describe.register(Mapping)
def _(value: Mapping[object, object]) -> object:
    return ["map", _sorted([_describe(key), _describe(item)] for key, item in value.items())]


@_describe.register(list)
@_describe.register(tuple)
@_describe.register(deque)
def _(value: Iterable[object]) -> object:
    return ["list", [_describe(item) for item in value]]


@_describe.register(set)
@_describe.register(frozenset)
def _(value: Iterable[object]) -> object:
    return ["set", _sorted(_describe(item) for item in value)]


@_describe.register(type)
@_describe.register(FunctionType)
@_describe.register(BuiltinFunctionType)
@_describe.register(MethodType)
def _(value: type | FunctionType) -> object:
    return ["named", _name(value)]


@_describe.register
def _(value: functools.partial) -> object:  # type: ignore[type-arg]  # the class, as registered
    return ["call", _describe(value.func), _describe(value.args), _describe(value.keywords)]


@_describe.register
def _(value: BeatLazyFunc) -> object:
    lazy = cast(Any, value)
    return ["call", _describe(lazy._func), _describe(lazy._func_params)]


@_describe.register
def _(value: tzinfo) -> object:
    name = getattr(value, "key", None) or getattr(value, "zone", None)
    offsets = [str(value.utcoffset(day)) for day in _WINTER_AND_SUMMER]
    return ["zone", str(name) if name else _name(value.__class__), offsets]


@_describe.register
def _(value: BaseSchedule) -> object:
    rule: object
    if is_custom(value):
        rule = [_describe_custom(value), _describe(zone_of(value))]
    elif isinstance(value, crontab):
        rule = [_describe(asdict(Pattern.of(value))), _describe(zone_of(value))]
    elif isinstance(value, solar):
        rule = [value.event, _describe(float(value.lat)), _describe(float(value.lon))]
    else:
        rule = _describe_interval(cast(schedule, value))
    return ["schedule", _name(value.__class__), _describe(getattr(value, "nowfun", None)), rule]


def _describe_interval(interval: schedule) -> object:
    period = _describe(cast(Any, interval).run_every)
    return [period, _describe(zone_of(interval) if interval.relative else None)]


def _describe_custom(custom: BaseSchedule) -> object:
    """Its author's own ``__reduce__`` if there is one, as that is meant to hold all of it."""
    kind = custom.__class__
    stock = (object, BaseSchedule, schedule, crontab, solar)
    if not any(kind.__reduce__ is known.__reduce__ for known in stock):
        return _describe(custom.__reduce__()[1:])
    return _describe(
        {
            name: value
            for name, value in vars(custom).items()
            if name not in _BINDINGS and not _is_cached(kind, name)
        }
    )


def _is_cached(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)


def _name(value: type | FunctionType) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _sorted(described: Iterable[object]) -> list[object]:
    return sorted(described, key=_as_text)


def _as_text(described: object) -> str:
    return json.dumps(described, separators=(",", ":"))
