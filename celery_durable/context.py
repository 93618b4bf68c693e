"""Which run the calling code is in: a context variable, so that it holds per thread and per greenlet."""

from __future__ import annotations

from contextvars import ContextVar
from datetime import datetime
from typing import Any, Protocol

from celery_durable.errors import NotDurable
from celery_durable.lease import Lease


class Run(Protocol):
    """What the durable calls of a body need: a real run, or an eager one."""

    lease: Lease

    def step(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def sleep(self, seconds: float, name: str | None) -> None: ...

    def sleep_until(self, when: datetime, name: str | None) -> None: ...


current_run: ContextVar[Run | None] = ContextVar("celery_durable_run", default=None)


def require_run(call: str) -> Run:
    """The run that the calling code is part of.

    Raises NotDurable, naming ``call``, where there is none.
    """
    run = current_run.get()
    if run is None:
        raise NotDurable(call)
    return run
