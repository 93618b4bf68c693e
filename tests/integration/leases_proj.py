"""The project of the lease tests: tasks that work, block, swallow, die; the witness hears of their leases.

In a sighting ``attempt`` is the fencing token of the run.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import threading
import time
from typing import Any

from celery import Celery, signals
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Pool, event

from celery_durable import Durable, DurableTask, current_lease, sleep, step
from celery_durable.signals import lease_lost, task_quarantined, task_recovered
from celery_durable.worker import side, upkeep
from celery_durable.worker.interrupt import deliver_to_nobody
from tests.nodes import Witness
from tests.nodes.bench import CONF_VARIABLE

app = Celery("leases")
app.conf.update(durable_lease_ttl=6, durable_heartbeat_interval=1, durable_revoke_grace=4)
app.conf.durable_poll_interval = 0.1
app.conf.update(json.loads(os.environ.get(CONF_VARIABLE, "{}")))
durable = Durable(app)

if os.environ.get("LEASES_NO_INTERRUPTS"):
    # A pool that cannot interrupt what it runs.
    side.deliver_to_thread = deliver_to_nobody
if os.environ.get("LEASES_ADOPT_AFTER"):
    upkeep.ADOPT_AFTER = float(os.environ["LEASES_ADOPT_AFTER"])
if os.environ.get("LEASES_SPY"):
    # Which process uses which connection of the server.
    @event.listens_for(Pool, "checkout")
    def on_checkout(connection: Any, *args: Any) -> None:
        Witness.here().saw("statement", str(connection.info.backend_pid))


TICK = 0.1
ALWAYS = 1_000_000


def saw(task_id: str, what: str, token: int | None = None) -> None:
    """Tell the witness, with the token of the run."""
    Witness.here().saw(task_id, what, current_lease().token if token is None else token)


# -- what is told of leases ------------------------------------------------------------------------


@lease_lost.connect
def on_lease_lost(task_id: str, token: int, **kwargs: Any) -> None:
    saw(task_id, "lease_lost", token)


@task_recovered.connect
def on_recovered(task_id: str, token: int, **kwargs: Any) -> None:
    saw(task_id, "recovered", token)


@task_quarantined.connect
def on_quarantined(task_id: str, token: int | None, **kwargs: Any) -> None:
    saw(task_id, "quarantined", token or 0)


@signals.task_revoked.connect
def on_revoked(request: Any, **kwargs: Any) -> None:
    saw(request.id, "revoked", 0)


@signals.task_failure.connect
def on_failure(task_id: str, **kwargs: Any) -> None:
    saw(task_id, "failure", 0)


@signals.task_success.connect
def on_success(sender: Any, **kwargs: Any) -> None:
    saw(sender.request.id, "success", 0)


# -- plain tasks -----------------------------------------------------------------------------------


@app.task(bind=True)
def plain(self: Any, *args: Any) -> str:
    saw(self.request.id, "plain", 0)
    return "plain"


@app.task
def failed(request: Any, exc: Any, traceback: Any) -> None:
    """An errback of the new style."""
    saw(request.id, f"errback {type(exc).__name__}", 0)


# -- bodies ----------------------------------------------------------------------------------------


def tick(seconds: float) -> None:
    """Python code that waits a little now and then."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(TICK)
        saw(current_lease().task_id, "tick")


def tick_politely(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        current_lease().check()
        time.sleep(TICK)
        saw(current_lease().task_id, "tick")


def spin(seconds: float) -> None:
    """Python code that never waits."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(200_000):
            pass
        saw(current_lease().task_id, "tick")


def swallow(seconds: float) -> None:
    """A body that nothing stops."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            tick(seconds)
        except BaseException:  # noqa: BLE001 - that is what such a body does
            saw(current_lease().task_id, "swallowed")


def wait_for_data(seconds: float) -> None:
    ours, _theirs = socket.socketpair()
    ours.settimeout(seconds)
    ours.recv(1)


def wait_for_lock(seconds: float) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=seconds)


def sleep_in_place(seconds: float) -> None:
    """Short durable sleeps, each under the lease also where the database answers slowly."""
    for _ in range(int(seconds / 0.5)):
        sleep(0.5)


def hold_the_interpreter(seconds: float) -> None:
    """A C call during which no Python code runs in this process, and then some Python code."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    tick(seconds)


def swallow_in_step(seconds: float) -> None:
    step(swallow, seconds)


BODIES = {
    "tick": tick,
    "polite": tick_politely,
    "spin": spin,
    "swallow": swallow,
    "time.sleep": time.sleep,
    "socket": wait_for_data,
    "lock": wait_for_lock,
    "sleep in place": sleep_in_place,
    "hold": hold_the_interpreter,
    "swallow in step": swallow_in_step,
}


@app.task(base=DurableTask, bind=True)
def work(self: Any, how: str, seconds: float, again: float = 0) -> list[Any]:
    """Do one of the `BODIES` for some seconds, at a later run for `again` seconds."""
    task_id, token = self.request.id, current_lease().token
    saw(task_id, "body")
    try:
        if token == 1 or again:
            BODIES[how](seconds if token == 1 else again)
        saw(task_id, "done")
    finally:
        saw(task_id, "left")
    return [how, token]


def die(times: int, how: str) -> int:
    """Take the process along, in the first so many runs."""
    lease = current_lease()
    saw(lease.task_id, "body")
    if lease.token <= times:
        if how == "exit":
            raise SystemExit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    return lease.token


@app.task(base=DurableTask)
def dies(times: int = ALWAYS, how: str = "kill") -> int:
    return die(times, how)


@app.task(base=DurableTask, max_crashes=0)
def dies_at_most_once(times: int = ALWAYS, how: str = "kill") -> int:
    return die(times, how)


@app.task(base=DurableTask, bind=True)
def progresses_and_dies(self: Any, times: int) -> int:
    """It dies again and again, each time after one more step."""
    for number in range(times):
        step(int, number)
        if number + 1 >= current_lease().token:
            saw(self.request.id, "body")
            os.kill(os.getpid(), signal.SIGKILL)
    return current_lease().token


@app.task(base=DurableTask, bind=True)
def healthy(self: Any, number: int) -> int:
    saw(self.request.id, "body")
    return step(int, number)


@app.task(base=DurableTask, bind=True)
def works_and_naps(self: Any, seconds: float, nap: float) -> int:
    """The first run works, a later one goes to sleep at once."""
    saw(self.request.id, "body")
    if current_lease().token == 1:
        tick(seconds)
    sleep(nap)
    saw(self.request.id, "awake")
    return current_lease().token


@app.task(base=DurableTask, bind=True)
def heeds_soft_limit(self: Any, seconds: float) -> str:
    saw(self.request.id, "body")
    try:
        tick(seconds)
    except SoftTimeLimitExceeded:
        saw(self.request.id, "soft limit")
        return "limited"
    return "done"


@app.task(base=DurableTask, bind=True)
def two_steps_and_a_nap(self: Any, seconds: float, nap: float) -> str:
    """It works in two runs; each of them for so long."""
    step(tick, seconds)
    sleep(nap)
    step(tick, seconds)
    return "done"


@app.task(base=DurableTask, bind=True)
def eats_memory(self: Any, megabytes: int) -> int:
    saw(self.request.id, "body")
    self.eaten = bytearray(megabytes << 20)
    return os.getpid()
