"""Two plots as SVG, written by hand: bars of throughput, and how late wakes come."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from benchmarks.rows import Results, Row, Samples
from benchmarks.table import number

WIDTH = 860
LEFT = 400
RIGHT = 90
LINE = 17
OURS, BASE = "#2563a8", "#b8bcc4"
COLOURS = ("#2563a8", "#c2571a", "#3a8a3e", "#8a4fb0", "#b23a48", "#5d6d7e", "#b58900", "#1b8a8f")
#: Milliseconds between which lateness is drawn.
LEAST, MOST = 1.0, 10_000.0
#: The rows that the throughput plot shows.
PER_SECOND = ("noop_", "step_", "park_", "burst_")


def throughput(results: Results) -> str | None:
    """Pairs of bars, each with its spread; None: there is nothing to show."""
    rows = [row for row in results.rows if row.name.startswith(PER_SECOND) and row.ours.unit == "/s"]
    if not rows:
        return None
    largest = max(side.spread[1] for row in rows for side in _sides(row))
    scale = (WIDTH - LEFT - RIGHT) / largest
    parts, y = [], 50.0
    for row in rows:
        parts.append(_text(10, y + LINE * 0.75, row.title, size=12))
        y += LINE * 1.2
        for side, colour in zip(_sides(row), (OURS, BASE), strict=False):
            parts.extend(_bar(y, side, colour, scale))
            y += LINE
        y += LINE * 0.6
    return _page("Tasks per second (median, and the spread of the rounds)", y, parts)


def lateness(results: Results) -> str | None:
    """The share of wakes that came within so many milliseconds, for everybody who was measured."""
    rows = [row for row in results.rows if row.detail]
    if not rows:
        return None
    left, top, bottom = 60.0, 50.0, 350.0
    right = float(WIDTH - 250)
    parts = list(_grid(left, right, top, bottom))
    for place, row in enumerate(rows):
        colour = COLOURS[place % len(COLOURS)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in _shares(row.detail, left, right, top, bottom))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(_text(right + 15, top + 12 + place * LINE, _who(row), size=12, colour=colour))
    parts.append(_text((left + right) / 2 - 90, bottom + 38, "milliseconds after the due time", size=12))
    return _page("Wakes that had come, in percent", bottom + 50, parts)


def _sides(row: Row) -> tuple[Samples, ...]:
    return (row.ours,) if row.base is None else (row.ours, row.base)


def _bar(y: float, side: Samples, colour: str, scale: float) -> Iterator[str]:
    length, middle = side.median * scale, y + LINE * 0.4
    yield _text(LEFT - 8, y + LINE * 0.65, side.label, size=11, anchor="end")
    yield f'<rect x="{LEFT}" y="{y:.1f}" width="{length:.1f}" height="{LINE * 0.8:.1f}" fill="{colour}"/>'
    low, high = (LEFT + value * scale for value in side.spread)
    yield f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" stroke="#222"/>'
    yield _text(max(LEFT + length, high) + 6, y + LINE * 0.65, number(side.median), size=11)


def _shares(
    values: Sequence[float], left: float, right: float, top: float, bottom: float
) -> Iterator[tuple[float, float]]:
    ordered = sorted(values)
    for place, value in enumerate(ordered, start=1):
        yield _at(value, left, right), bottom - (bottom - top) * place / len(ordered)


def _at(milliseconds: float, left: float, right: float) -> float:
    kept = min(max(milliseconds, LEAST), MOST)
    return left + (right - left) * math.log(kept / LEAST) / math.log(MOST / LEAST)


def _grid(left: float, right: float, top: float, bottom: float) -> Iterator[str]:
    for tick in (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000):
        x = _at(tick, left, right)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="#e3e5e8"/>'
        yield _text(x, bottom + 18, f"{tick:,}", size=11, anchor="middle")
    for percent in (0, 25, 50, 75, 100):
        y = bottom - (bottom - top) * percent / 100
        yield f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e5e8"/>'
        yield _text(left - 8, y + 4, str(percent), size=11, anchor="end")


def _who(row: Row) -> str:
    # "wake lateness, 200 sleeps over 20 s, p50; Redis"
    who = row.title.rpartition("; ")[2]
    return f"durable, {who}" if row.goal is not None else who


def _page(title: str, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, _text(10, 26, title, size=16), *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, size: int, anchor: str = "start", colour: str = "#222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"
