"""The project of the chaos run: a task that lives by a program, and tells the record all that it does.

A program is a list of operations, such as ``[["step", 0.1], ["sleep", 3], ["retry", 1], ["fail", 0]]``:

    step     runs a step that takes so many seconds
    trip     runs a step that raises, which the body handles
    sleep    sleeps so long, as a row
    nap      sleeps below a second, in place
    work     keeps its process busy, in the open
    retry    is retried so often, a second later
    fail     raises, and nobody handles it
"""

from __future__ import annotations

import json
import os
import time
import uuid
from typing import Any

import time_machine
from celery import Celery

from celery_durable import Durable, DurableTask, current_lease, sleep, step
from tests.chaos import record
from tests.nodes.bench import CONF_VARIABLE

offset = float(os.environ.get(record.OFFSET_VARIABLE, "0"))
if offset:
    # The wall clock only: it may be wrong on a machine, the monotonic one cannot.
    time_machine.travel(time.time() + offset).start()

app = Celery("chaos")
app.conf.update(
    # Short, so that a run of some minutes sees each of them run out often.
    durable_lease_ttl=4,
    durable_heartbeat_interval=1,
    durable_revoke_grace=1,
    durable_poll_interval=0.5,
    durable_resend_delay=4,
    # Here a task is hit more often than any task deserves.
    durable_max_crashes=None,
    worker_prefetch_multiplier=2,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    # An outage is to be seen as one, by Celery's own connections too.
    broker_connection_timeout=3,
)
app.conf.update(json.loads(os.environ.get(CONF_VARIABLE, "{}")))
durable = Durable(app)


class Failure(Exception):
    """What a program ends with, or trips over."""


def effect(task_id: str, token: int, place: int, seconds: float) -> str:
    """A step: it leaves a line, and its value is in no other run's line."""
    nonce = uuid.uuid4().hex
    record.write(task_id, "ran", token=token, place=place, nonce=nonce)
    time.sleep(seconds)
    return nonce


def trip(task_id: str, token: int, place: int) -> None:
    raise Failure(effect(task_id, token, place, 0))


class Life:
    """One run of a program."""

    def __init__(self, request: Any) -> None:
        self.task_id = request.id
        self.retries = request.retries
        self.token = current_lease().token
        self.kept: list[str] = []

    def tell(self, what: str, place: int = -1, **facts: Any) -> None:
        record.write(self.task_id, what, token=self.token, place=place, **facts)

    def step(self, place: int, seconds: float) -> None:
        nonce = step(effect, self.task_id, self.token, place, seconds)
        self.tell("kept", place, nonce=nonce)
        self.kept.append(nonce)

    def trip(self, place: int, _: float) -> None:
        try:
            step(trip, self.task_id, self.token, place)
        except Failure as failure:
            # Journaled with the next durable call, so it is not kept before that.
            self.kept.append(str(failure))

    def sleep(self, place: int, seconds: float) -> None:
        self.tell("sleeps", place, value=seconds)
        sleep(seconds)
        self.tell("woke", place)

    nap = sleep

    def work(self, place: int, seconds: float) -> None:
        time.sleep(seconds)


@app.task(base=DurableTask, bind=True, max_retries=None)
def live(self: Any, *arguments: Any) -> dict[str, Any]:
    """The last argument is the program; those before it are what a chain or a chord hands on."""
    *received, program = arguments
    life = Life(self.request)
    life.tell("entered", value=received)
    for place, (operation, amount) in enumerate(program):
        if operation == "retry":
            if life.retries < amount:
                raise self.retry(countdown=1)
        elif operation == "fail":
            raise Failure(life.task_id)
        else:
            getattr(life, operation)(place, amount)
    life.tell("returns")
    return {"id": life.task_id, "kept": life.kept}


@app.task
def after(about: str) -> None:
    """A plain follower."""
    record.write(about, "plain follower")


@app.task
def failed(request: Any, exc: Any, traceback: Any) -> None:
    """An errback of the new style."""
    record.write(request.id, "errback")
