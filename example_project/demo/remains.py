"""What is left of the sleeping tasks while no process is: counted where it is kept."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from example_project.celery import app, durable


def sleeping_rows(task_ids: Collection[str]) -> int:
    """How many of these tasks are a sleeping row of the durable store."""
    return sum(execution.task_id in task_ids for execution in durable.list(status="sleeping"))


def messages(task_ids: Collection[str]) -> int:
    """How many messages of these tasks the broker has, waiting or taken by a process."""
    folder = Path(app.conf.broker_transport_options["folder"])
    bodies = [path.read_bytes() for path in folder.rglob("*.msg")]
    return sum(any(task_id.encode() in body for task_id in task_ids) for body in bodies)
