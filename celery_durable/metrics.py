"""Metrics through the OpenTelemetry API, where it is installed; else every call here does nothing.

The API alone records nothing either: what is exported, and where to, is the application's choice of an
SDK. Every instrument is named ``celery_durable.…``; spans are in seconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery_durable import signals
from celery_durable.clock import monotonic
from celery_durable.errors import DurableError

if TYPE_CHECKING:
    from celery_durable.store.statistics import Stats

logger = logging.getLogger(__name__)

#: Seconds for which the gauges of one collection share one reading.
_READING_KEPT = 1.0

_LATENESS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
_MARGIN = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 300.0)
_DURATION = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Instruments:
    """The instruments of one meter."""

    def __init__(self, meter: Any) -> None:
        def counter(name: str, text: str) -> Any:
            return meter.create_counter(f"celery_durable.{name}", description=text)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Any:
            full = f"celery_durable.{name}"
            try:
                return meter.create_histogram(
                    full, unit="s", description=text, explicit_bucket_boundaries_advisory=bounds
                )
            except TypeError:  # an API from before that was a parameter
                return meter.create_histogram(full, unit="s", description=text)

        self.claims = counter("claims", "Runs of durable tasks that began.")
        self.refusals = counter("claims.refused", "Messages that were dropped: duplicates, old ones.")
        self.lateness = histogram("wake.lateness", "From a sleep's due time to its claim.", _LATENESS)
        self.parks = counter("parks", "Sleeps that began.")
        self.renewals = counter("lease.renewals", "Leases that a heartbeat has renewed.")
        self.margin = histogram("lease.margin", "What was left of a lease when it was renewed.", _MARGIN)
        self.losses = counter("lease.losses", "Runs that lost their lease.")
        self.recoveries = counter("recoveries", "Runs that took over from a dead worker.")
        self.quarantines = counter("quarantines", "Tasks that were taken out of service.")
        self.dispatches = counter("dispatches", "Wake messages that the broker has confirmed.")
        self.resends = counter("resends", "Wake messages that were sent again.")
        self.batches = histogram("dispatch.duration", "Of one batch: take, publish, confirm.", _DURATION)


def _own_meter() -> Any:
    """The API's meter of this package; None where there is no API."""
    try:
        return import_module("opentelemetry.metrics").get_meter("celery_durable")
    except ImportError:
        return None


_instruments: Instruments | None = None


def use(meter: Any) -> None:
    """Record with this OpenTelemetry meter instead of the global provider's; None: record nothing."""
    global _instruments  # noqa: PLW0603 - one process, one meter
    _instruments = None if meter is None else Instruments(meter)


use(_own_meter())


# What the core says. Names of tasks are the only attributes: there are few of them.


def claimed(task_name: str) -> None:
    """A run has begun: its claim has committed."""
    if _instruments is not None:
        _instruments.claims.add(1, {"task": task_name})


def refused(task_name: str) -> None:
    """A message was dropped without a run."""
    if _instruments is not None:
        _instruments.refusals.add(1, {"task": task_name})


def woken(task_name: str, lateness: float) -> None:
    """A claim has ended a sleep, so many seconds after its due time, both by the database's clock."""
    if _instruments is not None:
        _instruments.lateness.record(max(lateness, 0.0), {"task": task_name})


def renewed(margins: Iterable[float]) -> None:
    """Leases were renewed, each with so many seconds left."""
    if _instruments is not None:
        for margin in margins:
            _instruments.renewals.add(1)
            _instruments.margin.record(max(margin, 0.0))


def dispatched(sent: int, resent: int, seconds: float) -> None:
    """A batch of wake messages went out: how many, how many of these not for the first time."""
    if _instruments is not None:
        _instruments.dispatches.add(sent)
        if resent:
            _instruments.resends.add(resent)
        _instruments.batches.record(seconds)


# What our signals say already.


def _on_parked(sender: Any, **_: Any) -> None:
    if _instruments is not None:
        _instruments.parks.add(1, {"task": _name(sender)})


def _on_lost(sender: Any, **_: Any) -> None:
    if _instruments is not None:
        _instruments.losses.add(1, {"task": _name(sender)})


def _on_recovered(sender: Any, **_: Any) -> None:
    if _instruments is not None:
        _instruments.recoveries.add(1, {"task": _name(sender)})


def _on_quarantined(sender: Any, **_: Any) -> None:
    if _instruments is not None:
        _instruments.quarantines.add(1, {"task": _name(sender)})


signals.task_parked.connect(_on_parked, weak=False)
signals.lease_lost.connect(_on_lost, weak=False)
signals.task_recovered.connect(_on_recovered, weak=False)
signals.task_quarantined.connect(_on_quarantined, weak=False)


def _name(sender: Any) -> str:
    return str(getattr(sender, "name", sender))


# What the database says: for a scheduler, or whichever one process is to tell it.


def observe(read: Callable[[], Stats], meter: Any = None) -> None:
    """Register the gauges of one namespace. ``read``: ``durable.stats``.

    They cost one look at all rows for each collection, so one process should do it, or a few: all see
    the same numbers. A database that is away leaves gaps.
    """
    meter = _own_meter() if meter is None else meter
    if meter is None:
        return
    reading = _Reading(read)
    observation = import_module("opentelemetry.metrics").Observation

    def gauge(name: str, text: str, values: Callable[[Stats], Iterator[Any]], unit: str = "") -> None:
        def callback(_: Any) -> list[Any]:
            stats = reading.latest()
            return [] if stats is None else list(values(stats))

        meter.create_observable_gauge(
            f"celery_durable.{name}", callbacks=[callback], unit=unit, description=text
        )

    def by_status(stats: Stats) -> Iterator[Any]:
        for status in _GAUGED | stats.counts.keys():
            yield observation(stats.counts.get(status, 0), {"status": status})

    gauge("executions", "Durable tasks by state.", by_status)
    gauge("overdue", "Tasks that are due and not claimed.", lambda s: iter([observation(s.overdue)]))
    gauge(
        "oldest_due.age", "How late the oldest of these is.", lambda s: iter([observation(s.lateness)]), "s"
    )
    gauge("outbox", "Messages of plain tasks that wait.", lambda s: iter([observation(s.outbox)]))
    gauge("leases", "Leases that are held.", lambda s: iter([observation(s.leases)]))
    gauge("leases.near_end", "Leases in their last third.", lambda s: iter([observation(s.leases_near_end)]))


#: States that are told of also when nothing is in them: an alert needs a zero.
_GAUGED = frozenset({"sleeping", "running", "quarantined"})


class _Reading:
    """One reading for all gauges of a collection, which ask one after the other."""

    def __init__(self, read: Callable[[], Stats]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._stats: Stats | None = None
        self._read_at: float | None = None

    def latest(self) -> Stats | None:
        with self._lock:
            now = monotonic()
            if self._read_at is None or now - self._read_at > _READING_KEPT:
                self._stats = self._try_to_read()
                self._read_at = monotonic()
            return self._stats

    def _try_to_read(self) -> Stats | None:
        try:
            return self._read()
        except DurableError as error:
            logger.debug("No gauges: %s", error)
            return None
