"""The durable calls of a task's body."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import ParamSpec, TypeVar

from celery import current_app
from celery.utils.time import make_aware

from celery_durable.context import require_run
from celery_durable.durations import Number, instant_of, seconds_of
from celery_durable.lease import Lease
from celery_durable.texts import flaw_of_text, shortened

P = ParamSpec("P")
R = TypeVar("R")


def sleep(duration: Number | timedelta | None = None, *, name: str | None = None, **units: Number) -> None:
    """Sleep durably: the task becomes a row until it is due, and holds nothing meanwhile.

    ``sleep(90)``, ``sleep(timedelta(hours=2))``, ``sleep(days=3, hours=1)``. The due time is fixed when the
    sleep is first written; a replay neither extends nor shortens it. Zero and less mean at once.
    ``name`` is journaled: another name at this place is a divergence.

    Raises:
        TypeError, ValueError: the length is no length, or the name no text; nothing was written.
        NotDurable: there is no run that could sleep.
        LeaseLost: the task belongs to another run by now.
    """
    seconds = seconds_of(duration, units)
    _check_name(name)
    require_run("sleep()").sleep(seconds, name)


def sleep_until(when: datetime, *, name: str | None = None) -> None:
    """Sleep durably until an instant. A naive one is read in the app's timezone, by Celery's own rule.

    Raises as ``sleep`` does.
    """
    instant = instant_of(when, current_app.timezone, make_aware)
    _check_name(name)
    require_run("sleep_until()").sleep_until(instant, name)


def _check_name(name: str | None) -> None:
    flaw = None if name is None else flaw_of_text(name)
    if flaw is not None:
        raise (ValueError if isinstance(name, str) else TypeError)(f"the name {shortened(name)} {flaw}")


def step(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run ``fn(*args, **kwargs)`` once per task, and journal its result.

    A replay returns the journaled result and does not call ``fn``. The first run gets the value back as
    every replay will: decoded from what was stored. A step that was running when its worker died runs
    again, so give its effects a key made of the task id and the step.

    Raises:
        whatever ``fn`` raises; StepFailed in its place where the exception cannot be rebuilt.
        PayloadTooLarge: the result is over ``durable_payload_limit``.
        StepLimitExceeded, NotDurable, ReplayDivergence, LeaseLost.
    """
    return require_run("step()").step(fn, args, kwargs)  # type: ignore[no-any-return]


def current_lease() -> Lease:
    """The lease of the running task.

    Raises NotDurable outside of one.
    """
    return require_run("current_lease()").lease
