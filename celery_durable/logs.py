"""Structured fields of log records: which task, under which token, at which position of its journal."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

#: Says the fields of the run that the calling thread or greenlet works on.
current_fields: ContextVar[Callable[[], dict[str, Any]] | None] = ContextVar(
    "celery_durable_log_fields", default=None
)


def about(task_name: str | None, task_id: str, token: int | None = None) -> dict[str, Any]:
    """The ``extra`` of a log line about a task whose run is not the caller's own, or is none."""
    return {"task_name": task_name, "task_id": task_id, "token": token}


class RunFields(logging.Filter):
    """Gives each record that is made within a run ``task_id``, ``task_name``, ``token`` and ``position``.

    A filter for handlers. What a record brings along itself stays. Outside of a run ``token`` and
    ``position`` are None, so that a format may name them; ``task_id`` and ``task_name`` are left to Celery.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields. Drops nothing."""
        fields = record.__dict__
        source = current_fields.get()
        if source is not None:
            run = source()
            if fields.get("task_id", run["task_id"]) == run["task_id"]:
                fields.update({**run, **_own(fields, run)})
        fields.setdefault("token", None)
        fields.setdefault("position", None)
        return True


def _own(fields: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in run if fields.get(name) is not None}


def add_run_fields(logger: logging.Logger, **_: Any) -> None:
    """Put the filter on the handlers of a logger: a receiver of Celery's ``after_setup_logger``."""
    for handler in logger.handlers:
        if not any(isinstance(known, RunFields) for known in handler.filters):
            handler.addFilter(RunFields())
