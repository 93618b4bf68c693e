"""A log book of runs: which process ran which task, from when to when.

A durable task that sleeps runs more than once, and Celery's own signals tell of each run.
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Task
from celery.signals import task_postrun, task_prerun

from example_project.shop import database


@task_prerun.connect
def note_start(task_id: str, task: Task[Any, Any], **_: Any) -> None:
    with database() as db:
        db.execute(
            "INSERT INTO runs (task_id, task_name, pid, started_at) VALUES (?, ?, ?, ?)",
            (task_id, task.name, os.getpid(), time.time()),
        )


@task_postrun.connect
def note_end(task_id: str, state: str | None = None, **_: Any) -> None:
    """A run that ended in a sleep has the state IGNORED here."""
    with database() as db:
        db.execute(
            "UPDATE runs SET ended_at = ?, state = ? WHERE task_id = ? AND pid = ? AND ended_at IS NULL",
            (time.time(), state, task_id, os.getpid()),
        )
