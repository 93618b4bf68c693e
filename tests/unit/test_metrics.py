"""Metrics: what is recorded where there is an API, and that nothing is needed where there is none."""

from __future__ import annotations

import subprocess
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_durable import metrics, signals
from celery_durable.errors import StoreUnavailable
from celery_durable.store.statistics import Stats

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
STATS = Stats(
    now=NOW,
    counts={"sleeping": 3, "failed": 1},
    outbox=2,
    overdue=1,
    oldest_due_at=NOW - timedelta(seconds=90),
    next_due_at=None,
    unclaimed=0,
    most_sends=0,
    leases=4,
    leases_near_end=1,
    leases_expired=0,
    scheduler_seen=None,
)


class Instrument:
    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def add(self, amount: float, attributes: Any = None) -> None:
        self._log.append((amount, attributes))

    record = add


class Meter:
    """Keeps what is recorded, by the name of the instrument."""

    def __init__(self) -> None:
        self.recorded: dict[str, list[Any]] = defaultdict(list)
        self.gauges: dict[str, Callable[[Any], list[Any]]] = {}

    def create_counter(self, name: str, **_: Any) -> Instrument:
        return Instrument(self.recorded[name])

    def create_histogram(self, name: str, *, unit: str, description: str) -> Instrument:
        """As an API had it before buckets could be advised."""
        return Instrument(self.recorded[name])

    def create_observable_gauge(self, name: str, *, callbacks: list[Any], **_: Any) -> None:
        (self.gauges[name],) = callbacks


class Task:
    name = "of a task"


@dataclass(frozen=True)
class Observation:
    value: float
    attributes: Any = None


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meter]:
    api = types.ModuleType("opentelemetry.metrics")
    api.Observation = Observation  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "opentelemetry", types.ModuleType("opentelemetry"))
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", api)
    meter = Meter()
    metrics.use(meter)
    yield meter
    metrics.use(None)


def test_what_the_core_says_is_recorded(meter: Meter) -> None:
    metrics.claimed("t")
    metrics.refused("t")
    metrics.woken("t", 0.25)
    metrics.renewed([40.0, 50.0])
    metrics.dispatched(10, 2, 0.05)
    assert {name: log for name, log in meter.recorded.items() if log} == {
        "celery_durable.claims": [(1, {"task": "t"})],
        "celery_durable.claims.refused": [(1, {"task": "t"})],
        "celery_durable.wake.lateness": [(0.25, {"task": "t"})],
        "celery_durable.lease.renewals": [(1, None), (1, None)],
        "celery_durable.lease.margin": [(40.0, None), (50.0, None)],
        "celery_durable.dispatches": [(10, None)],
        "celery_durable.resends": [(2, None)],
        "celery_durable.dispatch.duration": [(0.05, None)],
    }


@pytest.mark.parametrize(
    ("signal", "name"),
    [
        (signals.task_parked, "parks"),
        (signals.lease_lost, "lease.losses"),
        (signals.task_recovered, "recoveries"),
        (signals.task_quarantined, "quarantines"),
    ],
)
def test_what_signals_say_is_recorded(meter: Meter, signal: Any, name: str) -> None:
    signal.send(sender=Task(), task_id="a", token=1)
    signal.send(sender="of a name", task_id="a", token=1)
    assert meter.recorded[f"celery_durable.{name}"] == [
        (1, {"task": "of a task"}),
        (1, {"task": "of a name"}),
    ]


def test_gauges_tell_the_statistics_and_a_zero_where_an_alert_needs_one(meter: Meter) -> None:
    metrics.observe(lambda: STATS, meter)
    by_status = {o.attributes["status"]: o.value for o in meter.gauges["celery_durable.executions"](None)}
    assert by_status == {"sleeping": 3, "failed": 1, "running": 0, "quarantined": 0}
    rest = {name: gauge(None)[0].value for name, gauge in meter.gauges.items() if "executions" not in name}
    assert rest == {
        "celery_durable.overdue": 1,
        "celery_durable.oldest_due.age": 90.0,
        "celery_durable.outbox": 2,
        "celery_durable.leases": 4,
        "celery_durable.leases.near_end": 1,
    }


def test_the_gauges_of_one_collection_share_one_reading(meter: Meter) -> None:
    readings = iter([STATS, replace(STATS, overdue=99)])
    metrics.observe(lambda: next(readings), meter)
    assert [gauge(None) != [] for gauge in meter.gauges.values()] == [True] * 6
    assert meter.gauges["celery_durable.overdue"](None)[0].value == 1


def test_a_database_that_is_away_leaves_a_gap(meter: Meter) -> None:
    def away() -> Stats:
        raise StoreUnavailable("connection refused")

    metrics.observe(away, meter)
    assert [gauge(None) for gauge in meter.gauges.values()] == [[]] * 6


def test_without_the_api_nothing_is_recorded_and_nothing_fails() -> None:
    """In a process of its own, where it cannot be imported."""
    script = """
import sys
sys.modules["opentelemetry"] = None
from celery_durable import metrics, signals
metrics.claimed("t"), metrics.refused("t"), metrics.woken("t", 1.0), metrics.renewed([1.0])
metrics.dispatched(1, 1, 1.0)
signals.lease_lost.send(sender="t", task_id="a", token=1, reason="")
metrics.observe(lambda: 1 / 0)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
