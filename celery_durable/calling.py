"""How a durable task is called: as a claimed run, eagerly, or as a plain function.

Celery's tracer calls the task. A base class of the user's may have a ``__call__`` around that, which goes on
with ``super().__call__`` or with ``self.run`` (an app context, a transaction). All of it is the body: it lies
under the lease, it may sleep, and what leaves it is how the run ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from celery import Task

from celery_durable.context import current_run
from celery_durable.execution import EagerExecution
from celery_durable.lease import EternalLease
from celery_durable.run import claimed_run

#: A body, told how the innermost call goes on.
Body = Callable[[Callable[..., Any]], Any]

#: The task whose own ``__call__`` is on, and how the innermost call goes on.
_inner: ContextVar[tuple[Any, Callable[..., Any]] | None] = ContextVar("celery_durable_inner", default=None)


def call(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The innermost ``__call__`` of a durable task."""
    inner = _inner.get()
    if inner is None or inner[0] is not task:
        return _enter(task, lambda go_on: go_on(*args, **kwargs))
    # For once: the body may call its own task as a plain function.
    token = _inner.set(None)
    try:
        return inner[1](*args, **kwargs)
    finally:
        _inner.reset(token)


def as_body(own: Callable[..., Any]) -> Callable[..., Any]:
    """A ``__call__`` of the user's as a part of the body."""

    @wraps(own)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - stands in its place
        def body(go_on: Callable[..., Any]) -> Any:
            token = _inner.set((self, go_on))
            try:
                return own(self, *args, **kwargs)
            finally:
                _inner.reset(token)

        return _enter(self, body)

    __call__.enters_run = True  # type: ignore[attr-defined]
    return __call__


def _enter(task: Any, body: Body) -> Any:
    run = claimed_run()
    if run is not None and run.task is task and not run.entered:
        return run.call_body(lambda: body(task.run))
    request = task.request
    if request.is_eager and not getattr(request, "durable_entered", False):
        request.durable_entered = True
        return _enter_eagerly(task, body)
    # A plain function call, perhaps from the body of another task: nothing here is durable.
    token = current_run.set(None)
    try:
        return body(lambda *args, **kwargs: Task.__call__(task, *args, **kwargs))
    finally:
        current_run.reset(token)


def _enter_eagerly(task: Any, body: Body) -> Any:
    durable = task._durable()
    run = EagerExecution(EternalLease(task.request.id or ""), durable.eager_codec, durable.step_limit)
    token = current_run.set(run)
    try:
        return body(task.run)
    finally:
        current_run.reset(token)
