"""The project of the integration tests: durable and plain tasks that tell the witness what they do.

Broker, result store and database come from the environment, Celery settings from `TEST_CELERY_CONF`; with
nothing there it is an embedded application. `PROJ_VERSION` says which release of the tasks this is.
"""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta
from typing import Any

from celery import Celery, chain
from celery.exceptions import Ignore, Reject

from celery_durable import Durable, DurableTask, current_lease, sleep, sleep_until, step
from tests.nodes import Witness
from tests.nodes.bench import CONF_VARIABLE

app = Celery("proj")
# A wake is at most this late where the database cannot notify.
app.conf.durable_poll_interval = 0.1
app.conf.update(json.loads(os.environ.get(CONF_VARIABLE, "{}")))
durable = Durable(app)

VERSION = int(os.environ.get("PROJ_VERSION", "1"))


def did(task_id: str, what: str, value: Any = None) -> Any:
    """Tell the witness, and give `value` back: as a step, or in the open."""
    Witness.here().saw(task_id, what)
    return value


def fail(task_id: str, what: str, error: Exception) -> None:
    """Tell the witness, and raise."""
    did(task_id, what)
    raise error


class Unpicklable(Exception):
    """It cannot be rebuilt from its arguments."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


class Watched(DurableTask):
    """Tells the witness of Celery's hooks."""

    abstract = True

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        did(task_id, "on_success")

    def on_failure(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        did(task_id, "on_failure")

    def on_retry(self, exc: Exception, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        did(task_id, "on_retry")


# -- plain tasks ---------------------------------------------------------------------------------


@app.task(bind=True)
def add(self: Any, *numbers: Any) -> int:
    """A plain task: the sum of what it is given, lists too."""
    did(self.request.id, "add")
    return sum(sum(n) if isinstance(n, list) else n for n in numbers)


@app.task(bind=True)
def note(self: Any, *args: Any, about: str = "", what: str = "note") -> Any:
    """A plain task that notes under another task's id that it ran."""
    did(about or self.request.id, what)
    return args[0] if args else None


@app.task
def failed(request: Any, exc: Any, traceback: Any) -> None:
    """An errback of the new style."""
    did(request.id, f"errback {type(exc).__name__}")


@app.task(bind=True)
def plain_end(self: Any, how: str) -> None:
    did(self.request.id, "body")
    raise Ignore if how == "ignore" else Reject("not mine", requeue=False)


# -- sleeping ------------------------------------------------------------------------------------


@app.task(base=Watched, bind=True)
def nap(self: Any, seconds: float, name: str | None = None) -> list[Any]:
    """The usual one: a step, a sleep, a step."""
    task_id = self.request.id
    did(task_id, "body")
    first = step(did, task_id, "before", "first")
    sleep(seconds, name=name)
    second = step(did, task_id, "after", "second")
    return [first, second, current_lease().token]


@app.task(base=DurableTask, bind=True)
def doze(self: Any, number: int, seconds: float) -> int:
    """One sleep, and the number back."""
    did(self.request.id, "body")
    sleep(seconds)
    did(self.request.id, "woken")
    return number


@app.task(base=DurableTask, bind=True)
def double(self: Any, number: Any, seconds: float = 0) -> Any:
    """A durable link of a chain."""
    did(self.request.id, "body")
    if seconds:
        sleep(seconds)
    return step(did, self.request.id, "doubled", number * 2)


@app.task(base=DurableTask, bind=True)
def work(self: Any, seconds: float) -> int:
    """Keeps its process busy."""
    did(self.request.id, "body")
    time.sleep(seconds)
    did(self.request.id, "worked")
    return os.getpid()


#: What cannot go through JSON, by name.
DURATIONS: dict[str, Any] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "timedelta.max": timedelta.max,
    "timedelta.min": timedelta.min,
    "10 years": timedelta(days=3653),
}


@app.task(base=DurableTask, bind=True)
def sleep_for(self: Any, duration: Any, **units: Any) -> str:
    """Sleep for what JSON can say, or for one of `DURATIONS`."""
    did(self.request.id, "body")
    if isinstance(duration, str):
        duration = DURATIONS.get(duration, duration)
    sleep(duration, **units)
    did(self.request.id, "awake")
    return "awake"


@app.task(base=DurableTask, bind=True)
def sleep_till(self: Any, when: str) -> str:
    did(self.request.id, "body")
    sleep_until(datetime.fromisoformat(when))
    did(self.request.id, "awake")
    return "awake"


# -- steps and replay ----------------------------------------------------------------------------


@app.task(base=DurableTask, bind=True)
def step_fails_then_two_sleeps(self: Any) -> list[str]:
    task_id = self.request.id
    did(task_id, "body")
    try:
        step(fail, task_id, "failing", ValueError("no luck", 7))
    except ValueError as error:
        caught = repr(error)
    sleep(1.2)
    sleep(1.2)
    return [caught, step(did, task_id, "last", "end")]


@app.task(base=DurableTask, bind=True)
def step_fails_oddly(self: Any) -> list[str]:
    """A step that raises what cannot be rebuilt, before and after a replay."""
    task_id = self.request.id
    did(task_id, "body")
    try:
        step(fail, task_id, "failing", Unpicklable(7, "no luck"))
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        caught = f"{type(error).__name__}: {error}"
    did(task_id, caught)
    sleep(1.2)
    return [caught]


@app.task(base=DurableTask, bind=True)
def raise_step_failed(self: Any) -> None:
    step(fail, self.request.id, "failing", Unpicklable(7, "no luck"))


@app.task(base=DurableTask, bind=True)
def many_steps(self: Any, count: int) -> int:
    for number in range(count):
        step(did, self.request.id, "step", number)
    return count


@app.task(base=DurableTask, bind=True)
def large_step(self: Any, size: int) -> int:
    return len(step(did, self.request.id, "large", "x" * size))


@app.task(base=DurableTask, bind=True)
def odd_step(self: Any, catches: bool) -> str:
    """A step whose result no JSON can say."""
    try:
        step(did, self.request.id, "odd", object())
    except Exception as error:
        if not catches:
            raise
        sleep(1.2)
        return type(error).__name__
    return "encoded"


@app.task(base=DurableTask, bind=True)
def decoded(self: Any) -> list[Any]:
    """What a step gives: the same at its first run and at a replay."""
    value = step(did, self.request.id, "tuple", (1, (2, 3)))
    did(self.request.id, repr(value))
    sleep(1.2)
    return [repr(value)]


@app.task(base=DurableTask, bind=True)
def renamed(self: Any) -> str:
    """Its second release makes another call at the first position, its third the first's again."""
    task_id = self.request.id
    did(task_id, f"body of {VERSION}")
    if VERSION == 2:
        step(fail, task_id, "other", RuntimeError("must not run"))
    else:
        step(did, task_id, "first")
    sleep(1.2)
    step(did, task_id, "last")
    return f"release {VERSION}"


@app.task(base=DurableTask, bind=True)
def swallows(self: Any, then: str) -> str:
    """A bare except swallows the sleep."""
    task_id = self.request.id
    did(task_id, "body")
    try:
        sleep(1.2)
    except:  # noqa: E722
        did(task_id, "swallowed")
        if then == "step":
            step(did, task_id, "forbidden")
        if then == "raise":
            raise RuntimeError("instead") from None
        return "too early"
    step(did, task_id, "after")
    return "in time"


@app.task(base=DurableTask, bind=True)
def raises_in_finally(self: Any) -> str:
    did(self.request.id, "body")
    try:
        sleep(1.2)
    finally:
        if Witness.here().count(self.request.id, "body") == 1:
            raise RuntimeError("the cleanup failed")
    return "awake"


@app.task(base=DurableTask, bind=True, autoretry_for=(Exception,), max_retries=2)
def catches_exceptions(self: Any) -> str:
    task_id = self.request.id
    did(task_id, "body")
    try:
        sleep(1.2)
    except Exception:
        did(task_id, "caught")
        raise
    finally:
        did(task_id, "finally")
    return "awake"


# -- ends ----------------------------------------------------------------------------------------


class Abort(BaseException):
    """What no ``except Exception`` catches, Celery's neither: the pool itself reports it."""


class Closed(Ignore):
    """The pool process cannot send it: the pool reports that in its place."""

    def __reduce__(self) -> Any:
        raise TypeError("it cannot be pickled")


@app.task(base=Watched, bind=True)
def end_as(self: Any, how: str, seconds: float = 0) -> Any:
    """Come to an end in some way, perhaps after a sleep."""
    did(self.request.id, "body")
    if seconds:
        sleep(seconds)
    if how == "exception":
        raise KeyError("missing", 3)
    if how == "odd exception":
        raise Unpicklable(7, "no luck")
    if how == "odd value":
        return object()
    if how == "abort":
        raise Abort("now")
    if how == "ignore":
        raise Ignore
    if how == "odd ignore":
        raise Closed
    if how == "reject":
        raise Reject("not mine", requeue=False)
    return how


@app.task(base=Watched, bind=True)
def end_once(self: Any, how: str) -> str:
    """The first run ends in a way that brings the task back, the second returns."""
    did(self.request.id, "body")
    step(did, self.request.id, "step")
    if Witness.here().count(self.request.id, "body") == 1:
        if how == "requeue":
            raise Reject("again", requeue=True)
        if how == "system exit":
            raise SystemExit(3)
        if how == "os exit":
            os._exit(3)
        if how == "hang":
            did(self.request.id, "hangs")
            time.sleep(600)
    return "second run"


@app.task(base=DurableTask, bind=True, ignore_result=True)
def forget(self: Any, seconds: float) -> str:
    did(self.request.id, "body")
    sleep(seconds)
    did(self.request.id, "woken")
    return "nobody gets this"


@app.task(base=DurableTask, bind=True, track_started=True)
def tracked(self: Any) -> str:
    """Stays in its body until the test says `go`."""
    did(self.request.id, "body")
    while not Witness.here().count(self.request.id, "go"):
        time.sleep(0.02)
    return "tracked"


# -- retries -------------------------------------------------------------------------------------


@app.task(base=Watched, bind=True, max_retries=3)
def flaky(self: Any, countdown: float) -> list[int]:
    """Fails twice, each time after a step."""
    task_id = self.request.id
    did(task_id, f"body {self.request.retries}")
    number = step(did, task_id, "step", 7)
    if self.request.retries < 2:
        raise self.retry(countdown=countdown, exc=RuntimeError("not yet"))
    return [number, self.request.retries]


@app.task(base=Watched, bind=True, autoretry_for=(RuntimeError,), retry_backoff=False, max_retries=1)
def hopeless(self: Any, default_retry_delay: float = 0) -> None:
    did(self.request.id, f"body {self.request.retries}")
    raise RuntimeError("never")


hopeless.default_retry_delay = 1


@app.task(base=DurableTask, bind=True, max_retries=3)
def retries_with(self: Any, number: int) -> list[int]:
    """Its retry has other arguments: the journal starts anew."""
    step(did, self.request.id, f"step {number}")
    if number < 2:
        raise self.retry(args=(number + 1,), countdown=1.2)
    return [number]


@app.task(base=DurableTask, bind=True)
def replaced(self: Any, number: int) -> Any:
    did(self.request.id, "body")
    sleep(1.2)
    raise self.replace(chain(double.s(number), add.s(1)))


# -- the message ---------------------------------------------------------------------------------


@app.task(base=DurableTask, bind=True)
def describe(self: Any, seconds: float) -> list[dict[str, Any]]:
    """How the message looks before and after a sleep."""
    request = self.request
    seen = {
        "id": request.id,
        "args": request.args,
        "argsrepr": request.argsrepr,
        "kwargsrepr": request.kwargsrepr,
        "shadow": request.shadow,
        "origin": request.origin,
        "reply_to": request.reply_to,
        "correlation_id": request.correlation_id,
        "root_id": request.root_id,
        "parent_id": request.parent_id,
        "retries": request.retries,
        "expires": request.expires,
        "timelimit": request.timelimit,
        "custom": [request.headers.get("custom"), request.headers.get("x")],
        "stamps": request.stamps,
        "stamped_headers": request.stamped_headers,
        "routing_key": request.delivery_info["routing_key"],
        "priority": request.delivery_info["priority"],
        "headers": sorted(request.headers),
    }
    before = step(dict, seen)
    sleep(seconds)
    return [before, seen]
