"""The application that is measured: plain and durable tasks in one module, on one worker.

Broker and database come from the environment. Nobody stores results: on the plain side a stored result
would cost more than the task.
"""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready

from benchmarks.marks import mark
from celery_durable import Durable, DurableTask, sleep, sleep_until, step

#: The environment variable with further Celery settings as JSON.
CONF_VARIABLE = "BENCH_CONF"
#: A file that a worker makes when it consumes.
READY_VARIABLE = "BENCH_READY"

app = Celery("bench")
app.conf.task_ignore_result = True
app.conf.update(json.loads(os.environ.get(CONF_VARIABLE, "{}")))
durable = Durable(app)


@worker_ready.connect
def _tell_ready(**_: Any) -> None:
    path = os.environ.get(READY_VARIABLE)
    if path:
        Path(path).touch()


@app.task
def plain(label: str) -> None:
    """A plain Celery task that does nothing."""
    mark(label)


@app.task
def plain_eta(label: str, due: float) -> None:
    """The same, telling when it was due."""
    mark(label, due)


@app.task(base=DurableTask)
def noop(label: str) -> None:
    """A durable task that does nothing."""
    mark(label)


@app.task(base=DurableTask)
def one_step(label: str) -> None:
    """One journaled step that does nothing."""
    step(_nothing)
    mark(label)


@app.task(base=DurableTask)
def park(label: str, seconds: float) -> None:
    """Goes to sleep at once."""
    mark(label)
    sleep(seconds)


@app.task(base=DurableTask)
def wake(label: str, due: float) -> None:
    """Sleeps until ``due`` (seconds since the epoch), then tells of it."""
    sleep_until(datetime.fromtimestamp(due, timezone.utc))
    mark(label, due)


@app.task(base=DurableTask)
def replay(label: str, steps: int, seconds: float) -> None:
    """Journals steps, sleeps, and tells how many seconds the steps took when replayed."""
    began = time.perf_counter()
    for _ in range(steps):
        step(_nothing)
    took = time.perf_counter() - began
    sleep(seconds)
    mark(label, took)


@app.task(base=DurableTask)
def hold(label: str, seconds: float) -> None:
    """Runs for so long, holding its lease."""
    mark(label)
    time.sleep(seconds)


def _nothing() -> None:
    """A step."""
