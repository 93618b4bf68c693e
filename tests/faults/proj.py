"""The project of the fault tests: each task tells the witness what it does, and how often.

Short leases, so that the work of a dead process is taken over soon. `PROJ_WITHOUT` names a task that this
process does not know; `PROJ_ENTRY` has beat run an entry.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery
from celery.exceptions import Reject

from celery_durable import Durable, DurableTask, sleep, step
from tests.nodes import Witness
from tests.nodes.bench import CONF_VARIABLE

app = Celery("faults")
app.conf.update(
    durable_lease_ttl=3,
    durable_heartbeat_interval=1,
    durable_revoke_grace=1,
    durable_poll_interval=0.2,
    # Redis hands a message to a connection that a dead process has left to its children.
    durable_resend_delay=3,
    # Each process of a test works on one message at a time and holds no other.
    worker_prefetch_multiplier=1,
    worker_cancel_long_running_tasks_on_connection_loss=False,
)
if "PROJ_ENTRY" in os.environ:
    app.conf.beat_schedule = {"tick": {"task": "tests.faults.proj.tick", "schedule": 1.5}}
app.conf.update(json.loads(os.environ.get(CONF_VARIABLE, "{}")))
durable = Durable(app)


def did(task_id: str, what: str, value: Any = None) -> Any:
    """Tell the witness, and give `value` back: as a step, or in the open."""
    Witness.here().saw(task_id, what)
    return value


def count(task_id: str, what: str) -> int:
    return Witness.here().count(task_id, what)


def wait_for_go(task_id: str) -> None:
    """Keep the process busy until the test says `go`."""
    while not count(task_id, "go"):
        time.sleep(0.02)


class Watched(DurableTask):
    """Tells the witness of Celery's hooks, which run when the outcome has been told."""

    abstract = True

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        did(task_id, "success")

    def on_failure(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        did(task_id, "failure")


# -- those who come after ------------------------------------------------------------------------


@app.task
def plain_follower(about: str) -> None:
    did(about, "plain follower")


@app.task(base=DurableTask)
def durable_follower(about: str) -> None:
    step(did, about, "durable follower")


@app.task
def answer(about: str) -> str:
    return did(about, "plain follower", "unheard")


@app.task
def failed(request: Any, exc: Any, traceback: Any) -> None:
    """An errback of the new style."""
    did(request.id, "errback")


@app.task(bind=True)
def gather(self: Any, values: list[Any]) -> list[Any]:
    """The body of a chord."""
    return [did(self.request.id, "gathered"), *values][1:]


@app.task
def tick() -> None:
    did("tick", "tick")


# -- lives ---------------------------------------------------------------------------------------


@app.task(base=Watched, bind=True)
def walk(self: Any) -> str:
    """A life with everything in it: steps, a sleep in place, a sleep as a row, an end."""
    task_id = self.request.id
    did(task_id, "body")
    step(did, task_id, "first")
    sleep(0.3)
    step(did, task_id, "second")
    sleep(1.2)
    step(did, task_id, "third")
    return "walked"


@app.task(base=Watched, bind=True)
def fail(self: Any) -> None:
    did(self.request.id, "body")
    step(did, self.request.id, "step")
    raise KeyError("no luck")


@app.task(base=DurableTask, bind=True, ignore_result=True)
def unheard(self: Any) -> None:
    """Nobody is to be told of its end."""
    did(self.request.id, "body")
    step(did, self.request.id, "step")


@app.task(base=Watched, bind=True)
def member(self: Any) -> int:
    """A member of a chord."""
    did(self.request.id, "body")
    return step(did, self.request.id, "step", 7)


@app.task(base=Watched, bind=True, max_retries=3)
def retry_once(self: Any) -> list[int]:
    did(self.request.id, "body")
    number = step(did, self.request.id, "step", 7)
    if self.request.retries < 1:
        raise self.retry(countdown=1.2)
    return [number, self.request.retries]


@app.task(base=DurableTask, bind=True)
def replaced(self: Any) -> Any:
    did(self.request.id, "body")
    step(did, self.request.id, "step")
    raise self.replace(successor.si(self.request.id))


@app.task(base=Watched, bind=True)
def successor(self: Any, about: str) -> str:
    return step(did, about, "successor", "replaced")


@app.task(base=Watched, bind=True)
def diverge(self: Any) -> str:
    """Its second run makes another call, and those after it, until the test says `fixed`."""
    task_id = self.request.id
    did(task_id, "body")
    is_sound = count(task_id, "body") == 1 or count(task_id, "fixed")
    step(did if is_sound else count, task_id, "first")
    sleep(1.2)
    step(did, task_id, "last")
    return "fixed"


@app.task(base=Watched, bind=True)
def requeue_once(self: Any) -> str:
    did(self.request.id, "body")
    step(did, self.request.id, "step")
    if count(self.request.id, "body") == 1:
        raise Reject("again", requeue=True)
    return "again"


@app.task(base=Watched, bind=True)
def say(self: Any, what: str) -> str:
    """A short one."""
    did(self.request.id, "body")
    return step(did, self.request.id, "step", what)


@app.task(base=Watched, bind=True)
def hold(self: Any) -> str:
    did(self.request.id, "body")
    wait_for_go(self.request.id)
    return "let go"


@app.task(base=Watched, bind=True, max_crashes=0)
def hold_once(self: Any) -> str:
    """A crash would be its end."""
    did(self.request.id, "body")
    wait_for_go(self.request.id)
    return "let go"


@app.task(base=Watched, bind=True, lease_ttl=600)
def hold_long(self: Any) -> str:
    """Its lease would not run out within a test."""
    did(self.request.id, "body")
    wait_for_go(self.request.id)
    return "let go"


@app.task(base=Watched, bind=True)
def lose_process(self: Any) -> str:
    """The first run takes its process along."""
    did(self.request.id, "body")
    step(did, self.request.id, "step")
    if count(self.request.id, "body") == 1:
        os._exit(3)
    return "survived"


@app.task(base=Watched, bind=True, time_limit=1)
def hang(self: Any) -> None:
    did(self.request.id, "body")
    time.sleep(600)


@app.task(base=Watched, bind=True)
def nap(self: Any, seconds: float) -> str:
    did(self.request.id, "body")
    sleep(seconds)
    step(did, self.request.id, "woken")
    return "napped"


if os.environ.get("PROJ_WITHOUT") != "stranger":

    @app.task(base=Watched, bind=True)
    def stranger(self: Any) -> str:
        """A task that not every worker knows."""
        did(self.request.id, "body")
        return "known"
