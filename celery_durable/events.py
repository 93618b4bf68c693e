"""Worker events for monitors, sent from the process that runs the task."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def send_task_event(task: Any, kind: str, task_id: str, **fields: Any) -> None:
    """Send a worker event of a task, where the worker sends events at all. Never raises.

    A monitor that misses one sees the next; a task does not fail for it.
    """
    worker = task.app.durable.worker
    if worker is None or not worker.sends_events or not task.send_events:
        return
    try:
        with task.app.events.default_dispatcher(hostname=worker.node) as dispatcher:
            dispatcher.send(kind, uuid=task_id, retry=False, **fields)
    except Exception as error:  # noqa: BLE001 - whatever the broker says
        logger.debug("Event %s of %s was not sent: %r", kind, task_id, error)
