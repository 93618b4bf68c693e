"""Spans and instants, as people write them: the types of options."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import click
from celery.utils.time import maybe_iso8601

from celery_durable.durations import seconds_of

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
_SPAN = re.compile(rf"[+-]?(?:{_PART.pattern})+|[+-]?\d+(?:\.\d+)?")
_ENDS_IN_A_UNIT = re.compile(r"[a-z]$")
#: The shortest text that is read as a date.
_DATE = len("20260301")


def span(text: str) -> timedelta:
    """A span such as ``90`` (seconds), ``30s``, ``1h30m`` or ``-2d``. Raises click's BadParameter."""
    text = text.strip()
    if not _SPAN.fullmatch(text):
        raise click.BadParameter(f"{text!r} is no span of time; write 90, 30s, 5m, 1h30m or 2d")
    digits = text.lstrip("+-")
    parts = _PART.findall(digits)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else float(digits)
    try:
        seconds = seconds_of(seconds, {})
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is too long: {error}") from error
    return timedelta(seconds=-seconds if text.startswith("-") else seconds)


def instant(text: str) -> datetime | timedelta:
    """A date and time, or a span from now. Raises click's BadParameter."""
    text = text.strip()
    if _ENDS_IN_A_UNIT.search(text) and _SPAN.fullmatch(text):
        return span(text)
    try:
        found = maybe_iso8601(text) if len(text) >= _DATE else None
    except ValueError:
        found = None
    if found is None:
        raise click.BadParameter(
            f"{text!r} is no time; write 2030-03-01, 2030-03-01T09:00, 2030-03-01T09:00:00+01:00, or a span"
            " from now such as 2h"
        )
    return found
