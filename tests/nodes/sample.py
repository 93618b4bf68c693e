"""A small Celery project without durable tasks, for the tests of the nodes themselves."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery

from tests.nodes.bench import CONF_VARIABLE
from tests.nodes.witness import Witness

app = Celery("sample")
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True
app.conf.beat_schedule = {"tick": {"task": "tests.nodes.sample.tick", "schedule": 0.2}}
app.conf.update(json.loads(os.environ.get(CONF_VARIABLE, "{}")))

if "CELERY_BROKER_URL" not in os.environ:
    from celery_durable.local import embedded_defaults

    app.conf.update(embedded_defaults(Path.cwd()))


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def pid() -> int:
    return os.getpid()


@app.task
def tick() -> None:
    Witness.here().saw("tick", "tick")


@app.task(bind=True)
def slow(self: Any, seconds: float) -> str:
    """Takes its time at the first run; a redelivered one is quick."""
    witness = Witness.here()
    witness.saw(self.request.id, "start")
    if witness.count(self.request.id, "start") == 1:
        time.sleep(seconds)
    witness.saw(self.request.id, "end")
    return "done"
