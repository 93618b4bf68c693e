"""The other apps of a test's process: what they send would go to the real broker, so it is refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery

from celery_durable.errors import ConfigurationError

#: The apps that a test drives at this time.
_driven: list[Any] = []


@contextmanager
def others_refused(app: Any) -> Iterator[None]:
    """Within this block only this app sends tasks, and those of blocks around it.

    Any other raises ConfigurationError where it is asked to: in ``delay``, ``apply_async``, ``send_task``.
    """
    before = Celery.send_task
    guarded = _guarded(before)
    _driven.append(app)
    # On the class: an app that is made later is held back as well.
    _replace(guarded)
    try:
        yield
    finally:
        _driven.remove(app)
        # Who has wrapped it meanwhile, to trace sends for instance, keeps what it has wrapped.
        if Celery.send_task is guarded:
            _replace(before)


def _replace(send_task: Any) -> None:
    setattr(Celery, "send_task", send_task)  # noqa: B010 - by its name: to a type checker it is a constant


def _guarded(send_task: Any) -> Any:
    @functools.wraps(send_task)
    def send_task_of(app: Any, name: str, *args: Any, **options: Any) -> Any:
        if _driven and not any(app is each for each in _driven):
            raise ConfigurationError(
                f"task {name} belongs to the app {app.main!r}, but durable_clock drives another one,"
                f" {_driven[-1].main!r}: define the fixture durable_celery_app so that it returns the app of"
                " the task"
            )
        return send_task(app, name, *args, **options)

    return send_task_of
