"""What to say of an id or of a task's name that nothing has."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from celery_durable.cli.tables import shown
from celery_durable.store.filters import Filter
from celery_durable.texts import flaw_of_text, shortened

if TYPE_CHECKING:
    from celery_durable.extension import Durable
    from celery_durable.operations import FilterOptions

#: So many ids are named that begin with what was typed.
NAMED = 3


def unknown_id(durable: Durable, task_id: str) -> str:
    """That there is no such task, and which ids begin like it: without a full stop."""
    if flaw_of_text(task_id) is not None:
        return f"There is no durable execution with the task id {shortened(task_id)}"
    found = durable.store.queries.find(Filter(id_start=task_id), limit=NAMED + 1) if task_id else ()
    similar = [shown(execution.task_id) for execution in found]
    text = f"There is no durable execution with the task id {task_id!r}"
    if not similar:
        return f"{text}: pruned, not started yet, or of another durable_namespace"
    others = ", …" if len(similar) > NAMED else ""
    return f"{text}: ids that begin so are {', '.join(similar[:NAMED])}{others}"


def unknown_task(durable: Durable, chosen: FilterOptions | None) -> str:
    """A clause that no task of the filter's name is registered; nothing where one is."""
    name = (chosen or {}).get("task")
    if name is None:
        return ""
    # The user's own modules. What is wrong with them is told by `durable check`.
    with contextlib.suppress(Exception):
        durable.app.loader.import_default_modules()
    return "" if name in durable.app.tasks else ": no task of that name is registered"
