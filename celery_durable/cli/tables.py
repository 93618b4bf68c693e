"""Tables, times and spans, for people to read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, tzinfo
from itertools import chain, islice

#: Shorter spans are shown with a digit behind the point.
_SHORT = 10.0
#: Control characters, line separators, changes of the writing direction, halves of surrogate pairs.
_UNSHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: Rows by which the widths of a long table are chosen.
MEASURED = 1000


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table with aligned columns; only its beginning is kept to measure it."""
    rest = ([shown(cell) for cell in row] for row in rows)
    first = list(islice(rest, MEASURED))
    if not first:
        return
    widths = [max(map(len, column)) for column in zip(head, *first, strict=True)]
    for row in chain([head], first, rest):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def facts(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Lines of names and values; what has no value is left out."""
    given = [(name, shown(value)) for name, value in pairs if value]
    width = max((len(name) for name, _ in given), default=0)
    for name, value in given:
        yield f"{name.ljust(width)}  {value}"


def shown(text: str) -> str:
    """A text in one line of a terminal: what would move the cursor, or cannot be encoded, is spelt out."""
    return _UNSHOWN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def time_text(instant: datetime | None, zone: tzinfo) -> str:
    """A time of day in a zone, in whole seconds; nothing for None."""
    if instant is None:
        return ""
    try:
        return instant.astimezone(zone).isoformat(" ", "seconds")
    except OverflowError:
        return instant.isoformat(" ", "seconds")


def span_text(seconds: float) -> str:
    """A length of time by its two largest units: ``3d 4h``, ``12s``, ``0.5s``."""
    if seconds < _SHORT:
        return f"{seconds:.1f}s"
    left = int(seconds)
    parts: list[tuple[int, str]] = []
    for unit, size in (("y", 31_557_600), ("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append((count, unit))
    return " ".join(f"{count}{unit}" for count, unit in parts[:2] if count)


def distance_text(instant: datetime, now: datetime) -> str:
    """How far an instant is from now: ``in 3d 4h``, ``12s ago``."""
    seconds = (instant - now).total_seconds()
    return f"in {span_text(seconds)}" if seconds > 0 else f"{span_text(-seconds)} ago"


def iso(instant: datetime | None) -> str | None:
    """An instant in JSON."""
    return None if instant is None else instant.isoformat()
