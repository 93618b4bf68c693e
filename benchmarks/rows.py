"""What a measurement gives: samples, what they are compared to, and the figure to reach."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Samples:
    """The values of one side, one for each round, in a unit such as ``"/s"``."""

    label: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest."""
        return min(self.values), max(self.values)


@dataclass(frozen=True)
class Goal:
    """A figure to reach: at least so much, or at most."""

    value: float
    at_most: bool = False
    #: For a figure that must be passed, not only be reached.
    strictly: bool = False

    def is_reached(self, figure: float) -> bool:
        if self.at_most:
            return figure <= self.value
        return figure > self.value if self.strictly else figure >= self.value

    def __str__(self) -> str:
        sign = "≤" if self.at_most else ">" if self.strictly else "≥"
        return f"{sign} {self.value:g}"


def at_least(value: float) -> Goal:
    return Goal(value)


def at_most(value: float) -> Goal:
    return Goal(value, at_most=True)


def more_than(value: float) -> Goal:
    return Goal(value, strictly=True)


@dataclass(frozen=True)
class Row:
    """One line of the table. Its figure is the ratio of the two sides, or the one side's median.

    ``name`` is stable: programs that read the JSON rely on it.
    """

    name: str
    title: str
    ours: Samples
    base: Samples | None = None
    goal: Goal | None = None
    note: str = ""
    #: Every single value behind ours, where the plot shows them.
    detail: tuple[float, ...] = ()

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratio of each round: its two sides were measured one after the other."""
        if self.base is None:
            return ()
        return tuple(ours / base for ours, base in zip(self.ours.values, self.base.values, strict=True))

    @property
    def figure(self) -> float:
        return statistics.median(self.ratios) if self.base is not None else self.ours.median

    @property
    def is_reached(self) -> bool | None:
        """None: there is nothing to reach."""
        return None if self.goal is None else self.goal.is_reached(self.figure)

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "figure": self.figure,
            "ratio": self.figure if self.base is not None else None,
            "ratios": list(self.ratios),
            "ours": _samples_as_json(self.ours),
            "base": None if self.base is None else _samples_as_json(self.base),
            "goal": None if self.goal is None else str(self.goal),
            "reached": self.is_reached,
            "note": self.note,
        }


@dataclass(frozen=True)
class Missing:
    """A line of the table that could not be measured, and why."""

    name: str
    title: str
    reason: str

    @classmethod
    def because(cls, name: str, title: str, error: Exception) -> Missing:
        """The first line of an error says it."""
        said = (str(error).splitlines() or [""])[0]
        return cls(name, title, f"{type(error).__name__}: {said}")


@dataclass
class Results:
    """What one run of the benchmarks has measured."""

    rows: list[Row] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)

    def add(self, found: Row | Missing) -> Results:
        if isinstance(found, Row):
            self.rows.append(found)
        else:
            self.missing.append(found)
        return self


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent of the values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def _samples_as_json(samples: Samples) -> dict[str, Any]:
    return {
        "label": samples.label,
        "unit": samples.unit,
        "values": list(samples.values),
        "median": samples.median,
        "spread": list(samples.spread),
    }
