"""A project that uses what Celery offers, with durable and plain tasks side by side.

Broker, result store and database come from the environment, Celery settings from `TEST_CELERY_CONF`. More
of the environment makes a release of it that differs:

    FEATURES_NAME      the app's name
    FEATURES_WITHOUT   a task that this release no longer has
    FEATURES_NARROW    this release no longer knows the serializer of its own
    FEATURES_LIMIT     sends of a wake after which a message that no worker understands is a failure
    FEATURES_ROUTES    it has quorum queues behind exchanges of its own, and one that all workers hear
    FEATURES_SECURITY  a folder with key.pem and certificate.crt, which sign its messages
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from celery import Celery, chain, chord, group, signals
from kombu import Exchange, Queue
from kombu.common import Broadcast
from kombu.serialization import register

from celery_durable import Durable, DurableTask, current_lease, sleep, step
from celery_durable import signals as durable_signals
from celery_durable.publisher import Publisher
from celery_durable.sender import Sender
from celery_durable.store.runs import Runs
from celery_durable.telling import TellingBackend
from celery_durable.worker import unread
from tests.nodes import Witness
from tests.nodes.bench import CONF_VARIABLE

NAME = os.environ.get("FEATURES_NAME", "features")

# Pickled messages are welcome here, and Celery wants root to say so.
os.environ["C_FORCE_ROOT"] = "1"

app = Celery(NAME)
app.conf.durable_poll_interval = 0.1
app.conf.task_default_queue = NAME
app.conf.accept_content = ["json", "own"]
app.conf.update(json.loads(os.environ.get(CONF_VARIABLE, "{}")))
durable = Durable(app)

if not os.environ.get("FEATURES_NARROW"):
    register("own", json.dumps, json.loads, content_type="application/x-own", content_encoding="utf-8")
else:
    app.conf.accept_content = ["json"]
if "FEATURES_LIMIT" in os.environ:
    unread.UNREAD_LIMIT = int(os.environ["FEATURES_LIMIT"])

if os.environ.get("FEATURES_ROUTES"):
    _quorum = {"queue_arguments": {"x-queue-type": "quorum"}}
    app.conf.task_queues = [
        Queue(NAME, Exchange(NAME, type="topic"), routing_key=NAME, **_quorum),
        Queue("europe", Exchange("regions", type="topic"), routing_key="eu.#", **_quorum),
        Queue("express", Exchange("lanes", type="direct"), routing_key="fast", **_quorum),
        Broadcast("everywhere"),
    ]
if folder := os.environ.get("FEATURES_SECURITY"):
    app.conf.update(
        task_serializer="auth",
        event_serializer="auth",
        accept_content=["auth"],
        result_accept_content=["json"],
        security_key=f"{folder}/key.pem",
        security_certificate=f"{folder}/certificate.crt",
        security_cert_store=f"{folder}/*.crt",
    )
    app.setup_security()


def did(task_id: str, what: str, value: Any = None) -> Any:
    """Tell the witness, and give `value` back."""
    Witness.here().saw(task_id, what)
    return value


def times(task_id: str, what: str) -> int:
    """How often the witness was told."""
    return Witness.here().count(task_id, what)


# -- being killed, or frozen, at a named point ----------------------------------------------------


def halt_point(how: str, point: str, task_id: str) -> Path:
    """A file that halts, once, the process which comes to this point of this task."""
    return Witness.here().path.parent / f"{how}-{point}-{task_id}"


def _pass_by(point: str, task_id: str) -> None:
    for how, number in (("kill", signal.SIGKILL), ("freeze", signal.SIGSTOP)):
        file = halt_point(how, point, task_id)
        if file.exists():
            file.unlink()
            did(task_id, f"{how} {point}")
            os.kill(os.getpid(), number)


def _watch(owner: type, method: str, task_id_of: Callable[..., str], before: str, after: str) -> None:
    call = getattr(owner, method)

    @functools.wraps(call)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        task_id = task_id_of(*args)
        _pass_by(before, task_id)
        answer = call(self, *args, **kwargs)
        _pass_by(after, task_id)
        return answer

    setattr(owner, method, watched)


def _of_key(key: Any, *_: Any) -> str:
    return str(key.task_id)


def _of_parent(outgoing: Any, *_: Any) -> str:
    return str(json.loads(outgoing[0].message.headers).get("parent_id") or "") if outgoing else ""


def _of_id(task_id: str, *_: Any) -> str:
    return task_id


# The points of a task's end, in their order.
_watch(Runs, "end", _of_key, "before end", "after end")
_watch(Publisher, "publish", _of_parent, "before publish", "published")
_watch(Sender, "send", _of_parent, "before send", "noted")
_watch(TellingBackend, "mark_as_done", _of_id, "before telling", "told")
_watch(Runs, "finish", _of_key, "before finish", "finished")


# -- signals and hooks ---------------------------------------------------------------------------

_TASK_ID_OF: dict[str, Callable[..., Any]] = {
    "task_received": lambda request, **_: request.id,
    "task_revoked": lambda request, **_: request.id,
    "task_retry": lambda request, **_: request.id,
    "task_success": lambda sender, **_: sender.request.id,
}


def _tell_of(name: str) -> None:
    of = _TASK_ID_OF.get(name, lambda task_id=None, **_: task_id)

    def receiver(**given: Any) -> None:
        state = f" {given['state']}" if name == "task_postrun" else ""
        task_id = of(**given)
        if task_id:
            did(task_id, f"{name}{state}")

    source = durable_signals if hasattr(durable_signals, name) else signals
    getattr(source, name).connect(receiver, weak=False)


for _name in (
    *("task_received", "task_prerun", "task_postrun", "task_success", "task_failure", "task_retry"),
    *("task_revoked", "task_internal_error"),
    *("task_parked", "task_woken", "task_recovered", "lease_lost", "task_quarantined"),
):
    _tell_of(_name)


@signals.task_prerun.connect
def _raise_once(task_id: str, args: Any, **_: Any) -> None:
    if "prerun raises" in (args or ()) and times(task_id, "raised") == 0:
        did(task_id, "raised")
        raise RuntimeError("a receiver of task_prerun fails")


@signals.task_postrun.connect
def _wait(task_id: str, args: Any, **_: Any) -> None:
    if "postrun waits" in (args or ()):
        time.sleep(0.5)


class Hooked(DurableTask):
    """Tells the witness of every hook."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        did(task_id, "before_start")

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        did(task_id, "on_success")

    def on_failure(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        did(task_id, "on_failure")

    def on_retry(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        did(task_id, "on_retry")

    def after_return(self, status: str, *_: Any) -> None:
        did(_[1], f"after_return {status}")


# -- plain tasks ---------------------------------------------------------------------------------


@app.task(bind=True)
def plain(self: Any, value: Any = None, *more: Any, about: str = "") -> Any:
    """Gives its first argument back."""
    did(about or self.request.id, "plain")
    return value


@app.task(bind=True)
def total(self: Any, numbers: list[Any]) -> Any:
    did(self.request.id, "total")
    return sum(numbers)


@app.task(bind=True)
def collect(self: Any, values: list[Any]) -> list[Any]:
    did(self.request.id, "collect")
    return values


@app.task(bind=True)
def plain_fails(self: Any, *_: Any) -> None:
    did(self.request.id, "plain_fails")
    raise ValueError("plain")


@app.task
def errback(request: Any, exc: Any, traceback: Any) -> None:
    """An errback of the new style: called in the worker that tells of the failure."""
    did(request.id, f"errback {type(exc).__name__}")


@app.task(bind=True)
def old_errback(self: Any, task_id: str) -> None:
    """An errback of the old style: a message of its own."""
    did(task_id, "old errback")


@app.task(base=DurableTask, bind=True)
def durable_errback(self: Any, task_id: str) -> None:
    did(task_id, "durable errback runs")
    sleep(1.1)
    did(task_id, "durable errback")


# -- durable tasks -------------------------------------------------------------------------------


@app.task(base=DurableTask, bind=True)
def nap(self: Any, value: Any = None, seconds: float = 1.1) -> Any:
    """Sleeps once, and gives its first argument back."""
    task_id = self.request.id
    did(task_id, "body")
    step(did, task_id, "before")
    sleep(seconds)
    return step(did, task_id, "after", value)


@app.task(base=DurableTask, bind=True)
def quick(self: Any, value: Any = None) -> Any:
    """Gives its first argument back, without a sleep."""
    return did(self.request.id, "body", value)


@app.task(base=DurableTask, bind=True, durable_eta=False)
def left_to_celery(self: Any, value: Any) -> Any:
    """Its countdowns and ETAs are the broker's, until a worker has the message."""
    return did(self.request.id, "body", value)


@app.task(base=DurableTask, bind=True)
def gather(self: Any, values: list[Any]) -> list[Any]:
    """A durable body of a chord."""
    did(self.request.id, "body")
    sleep(1.1)
    did(self.request.id, "gathered")
    return values


@app.task(base=Hooked, bind=True)
def fails(self: Any, value: Any = None, seconds: float = 0) -> Any:
    did(self.request.id, "body")
    if seconds:
        sleep(seconds)
    raise KeyError("durable")


@app.task(base=DurableTask, bind=True, max_crashes=1)
def crashes(self: Any) -> Any:
    did(self.request.id, "body")
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(base=DurableTask, bind=True)
def waits(self: Any, value: Any = None) -> Any:
    """Stays in its body until the test says `go`."""
    did(self.request.id, "body")
    while not times(self.request.id, "go"):
        time.sleep(0.02)
    return value


@app.task(base=Hooked, bind=True)
def hooked(self: Any, *_: Any, seconds: float = 1.1) -> str:
    """Two sleeps, then success."""
    did(self.request.id, "body")
    sleep(seconds)
    sleep(seconds)
    return "done"


@app.task(base=Hooked, bind=True)
def killed(self: Any) -> str:
    """Its first run takes the process with it."""
    did(self.request.id, "body")
    if times(self.request.id, "body") == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


@app.task(base=DurableTask, bind=True, ignore_result=True)
def forget(self: Any, seconds: float = 1.1) -> str:
    did(self.request.id, "body")
    sleep(seconds)
    return did(self.request.id, "after", "nobody gets this")


@app.task(base=DurableTask, bind=True, track_started=True)
def tracked(self: Any) -> str:
    """Stays in its body, before and after a sleep, until the test says `go`, twice."""
    for number in (1, 2):
        did(self.request.id, f"body {number}")
        while times(self.request.id, "go") < number:
            time.sleep(0.02)
        sleep(1.1)
    return "tracked"


@app.task(base=DurableTask, bind=True, rate_limit="2/s")
def limited(self: Any, about: str) -> str:
    did(about, "body")
    sleep(600)
    return did(about, "awake", "limited")


if not os.environ.get("FEATURES_NARROW"):

    @app.task(base=DurableTask, bind=True)
    def with_signature(self: Any, number: int, *, unit: str = "s") -> str:
        sleep(600)
        return f"{number}{unit}"

else:

    @app.task(base=DurableTask, bind=True, name=f"{__name__}.with_signature")
    def with_another_signature(self: Any) -> str:
        return "no arguments any more"


# -- the message ---------------------------------------------------------------------------------

#: What is the worker's, not the message's; an errback or callback that was made an object is no change.
_OF_THE_RUN = frozenset({"hostname", "_protected", "_children", "callbacks"})
#: What AMQP knows; Celery lets other things slip in where a transport takes all.
_PROPERTIES = frozenset({"correlation_id", "delivery_mode", "expiration", "priority", "reply_to"})


def note_request(task_id: str, request: Any) -> None:
    """Write down everything that a task can see of its request."""
    seen = {name: value for name, value in vars(request).items() if name not in _OF_THE_RUN}
    seen["delivery_info"] = {**seen["delivery_info"], "redelivered": None}
    seen["properties"] = {
        name: value for name, value in (seen.get("properties") or {}).items() if name in _PROPERTIES
    }
    with (Witness.here().path.parent / f"requests-{task_id}").open("a") as file:
        file.write(json.dumps(seen, default=repr, sort_keys=True) + "\n")


@app.task(base=DurableTask, bind=True, max_retries=3)
def everything(self: Any, payload: Any, *, mode: str) -> Any:
    """Sleeps three times, retries once, is killed once."""
    task_id = self.request.id
    note_request(task_id, self.request)
    did(task_id, "body")
    sleep(1.1)
    step(did, task_id, "first")
    sleep(1.1)
    if not self.request.retries:
        raise self.retry(countdown=1.1, exc=RuntimeError("once"))
    if not times(task_id, "dies"):
        did(task_id, "dies")
        os.kill(os.getpid(), signal.SIGKILL)
    sleep(1.1)
    step(did, task_id, "last")
    return [payload.value if mode == "pickle" else payload, step(did, task_id, "end", 7)]


@app.task
def linked(value: Any, *, about: str) -> Any:
    return did(about, "linked", value)


class Traced:
    """Tells, when it is unpickled, which process does it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Traced({self.value!r})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        did("unpickled", str(self.value))


class Brittle:
    """A deploy has changed its class: from then on the pool cannot read it, be it of processes or not."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        callers = {frame.name for frame in traceback.extract_stack()}
        if times("brittle", "breaks") and callers & {"trace_task_ret", "fast_trace_task"}:
            raise AttributeError("Brittle has no such attribute any more")
        self.__dict__.update(state)

    def __getstate__(self) -> dict[str, Any]:
        return {"made": "by an earlier release"}


@app.task(base=DurableTask, bind=True)
def echo(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Sleeps twice; what it was called with, by type."""
    did(self.request.id, "body")
    sleep(1.1)
    sleep(1.1)
    return [[repr(value) for value in args], {name: repr(value) for name, value in kwargs.items()}]


@app.task(base=DurableTask, bind=True)
def many_sleeps(self: Any, count: int) -> int:
    for _ in range(count):
        sleep(1.02)
    return did(self.request.id, "end", count)


@app.task(base=DurableTask, bind=True, max_retries=None)
def sleeps_and_retries(self: Any, count: int) -> int:
    """Sleeps so many times, with an ordinary retry after each."""
    note_request(self.request.id, self.request)
    for number in range(count):
        sleep(1.02)
        if self.request.retries == number:
            raise self.retry(countdown=0.2)
    return did(self.request.id, "end", count)


# -- retries and replacements --------------------------------------------------------------------


def _naive(seconds: float) -> datetime:
    """A naive time, which Celery reads as UTC."""
    return datetime.now(timezone.utc).replace(tzinfo=None) + timedelta(seconds=seconds)


def _elsewhere(seconds: float) -> datetime:
    """An aware time of another zone."""
    return datetime.now(timezone(timedelta(hours=9))) + timedelta(seconds=seconds)


#: The arguments of a retry, by what it is to show.
RETRIES: dict[str, Callable[[float], dict[str, Any]]] = {
    "once": lambda seconds: {"countdown": seconds},
    "no throw": lambda seconds: {"countdown": seconds, "throw": False},
    "new args": lambda seconds: {"countdown": seconds, "args": ("newer args",)},
    "unsendable": lambda seconds: {"countdown": seconds, "args": (object(),)},
    "naive eta": lambda seconds: {"eta": _naive(seconds)},
    "aware eta": lambda seconds: {"eta": _elsewhere(seconds)},
    "other queue": lambda seconds: {"countdown": seconds, "queue": "other", "priority": 3},
    "exhausted": lambda seconds: {"countdown": seconds, "exc": KeyError("never")},
    "exhausted, no exception": lambda seconds: {"countdown": seconds},
}


@app.task(base=Hooked, bind=True, max_retries=2)
def retries(self: Any, how: str, *, countdown: float = 1.1) -> Any:
    """Fails and tries again, in one of several ways."""
    task_id, number = self.request.id, self.request.retries
    did(task_id, f"body {number}")
    sleep(1.1)
    step(did, task_id, f"step of {self.request.args!r}")
    if number and not how.startswith("exhausted"):
        return [how, number]
    retry = RETRIES[how](countdown)
    if retry.get("throw", True):
        raise self.retry(**retry)
    self.retry(**retry)
    return "not this"


@app.task(
    base=Hooked,
    bind=True,
    autoretry_for=(Exception,),
    max_retries=2,
    retry_backoff=1,
    retry_jitter=False,
)
def backs_off(self: Any, wins: bool) -> int:
    """Celery's own way of trying again, around a sleep."""
    did(self.request.id, f"body {self.request.retries}")
    sleep(1.1)
    if wins and self.request.retries == 2:
        return int(self.request.retries)
    raise RuntimeError("not yet")


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that sees every exception."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except Exception:
            did(self.request.id, "decorator")
            raise

    return wrapper


@app.task(base=DurableTask, bind=True)
@logged
def decorated(self: Any) -> str:
    try:
        sleep(1.1)
    except Exception:
        did(self.request.id, "caught")
        raise
    finally:
        did(self.request.id, "finally")
    return "slept"


@app.task(base=DurableTask, bind=True)
def replaces(self: Any, how: str, number: int) -> Any:
    """Hands its id over after a sleep."""
    did(self.request.id, "body")
    step(did, self.request.id, "step")
    sleep(1.1)
    successors: dict[str, Callable[[], Any]] = {
        "durable": lambda: nap.s(number),
        "itself": lambda: self.s("nothing", number),
        "plain": lambda: plain.s(number, about=self.request.id),
        "chain": lambda: chain(plain.s(number), nap.s()),
        "group": lambda: group(nap.s(number), plain.s(number + 1)),
        "chord": lambda: chord([nap.s(number), plain.s(number + 1)], gather.s()),
    }
    if how == "nothing":
        return number
    raise self.replace(successors[how]())


@app.task(base=DurableTask, bind=True)
def leases(self: Any, _: Any = None) -> int:
    return current_lease().token


if "FEATURES_WITHOUT" in os.environ:
    app.tasks.pop(f"{__name__}.{os.environ['FEATURES_WITHOUT']}")
