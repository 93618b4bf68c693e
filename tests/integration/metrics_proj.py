"""A project whose worker keeps its metrics in memory, and tells them when it is asked."""

from __future__ import annotations

import logging
import time
from typing import Any

from celery import Celery
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from celery_durable import Durable, DurableTask, current_lease, metrics, sleep, step

READER = InMemoryMetricReader()
set_meter_provider(MeterProvider([READER]))

app = Celery("metrics_proj")
app.conf.worker_log_format = app.conf.worker_task_log_format = "%(message)s [token=%(token)s at=%(position)s]"
durable = Durable(app)
metrics.observe(durable.stats)
logger = logging.getLogger("users.own")


@app.task(base=DurableTask, name="nap")
def nap(seconds: float) -> None:
    step(str, "before")
    sleep(seconds)
    logger.warning("awake")


@app.task(base=DurableTask, name="lost", lease_ttl=1.2, heartbeat_interval=0.1)
def lost() -> None:
    """Is cancelled while it runs, after its first renewals."""
    renewed_at = current_lease().remaining
    time.sleep(0.3)
    assert current_lease().remaining < renewed_at + 1
    durable.cancel(current_lease().task_id)
    while True:
        current_lease().check()
        time.sleep(0.02)


@app.task(base=DurableTask, name="poison", max_crashes=1)
def poison() -> None:
    """Kills its workers."""


@app.task(name="dispatch")
def dispatch() -> int:
    """What a scheduler does, in the process whose metrics are read."""
    return durable.dispatch_due()


@app.task(name="collected")
def collected() -> dict[str, list[Any]]:
    """All that was recorded: name → [attributes, value or [count, sum]] of each series."""
    found: dict[str, list[Any]] = {}
    data: Any = READER.get_metrics_data()
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            value = point.value if hasattr(point, "value") else [point.count, point.sum]
            found.setdefault(metric.name, []).append([dict(point.attributes), value])
    return found
