"""Chords on a result store that cannot count. `PROJ_STAYS_AT_IT`: a worker that comes to no answer."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery, signals

from celery_durable import Durable, DurableTask, step
from celery_durable.chords import CHORD_UNLOCK
from tests.nodes import Witness
from tests.nodes.bench import CONF_VARIABLE

app = Celery("chords")
app.conf.update(durable_poll_interval=0.2, result_chord_retry_interval=0.2)
app.conf.update(json.loads(os.environ.get(CONF_VARIABLE, "{}")))
durable = Durable(app)


def saw(task_id: str, what: str, value: Any = None) -> Any:
    Witness.here().saw(task_id, what)
    return value


@app.task(base=DurableTask, bind=True)
def member(self: Any, value: int) -> int:
    return step(saw, self.request.id, "member", value)


@app.task(base=DurableTask, bind=True)
def gather(self: Any, values: list[int]) -> list[int]:
    return step(saw, self.request.id, "gathered", values)


if "PROJ_STAYS_AT_IT" in os.environ:

    @signals.task_prerun.connect
    def stay(task: Any, **_: Any) -> None:
        if task.name == CHORD_UNLOCK:
            saw("unlock", "asked")
            time.sleep(600)
