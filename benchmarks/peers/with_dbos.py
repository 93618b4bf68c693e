"""DBOS: workflows of a queue; what waits is enqueued with a delay."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from dbos import DBOS, DBOSClient

from benchmarks.marks import mark
from benchmarks.peers.run import Jobs

QUEUE = "bench"
VERSION = "1"


@DBOS.step()
def nothing() -> None:
    """A step."""


@DBOS.workflow()
def noop(label: str, due: float) -> None:
    """A workflow that does nothing."""
    mark(label, due)


@DBOS.workflow()
def step(label: str, due: float) -> None:
    """A workflow with one step."""
    nothing()
    mark(label, due)


def prepare(url: str) -> None:
    _launch(url)
    DBOS.destroy()


def fill(url: str, jobs: Jobs) -> None:
    client = DBOSClient(system_database_url=url)
    name = "step" if jobs.what == "step" else "noop"
    for due in jobs.dues:
        options: dict[str, Any] = {"workflow_name": name, "queue_name": QUEUE, "app_version": VERSION}
        if due:
            options["delay_seconds"] = max(due - time.time(), 0.001)
        client.enqueue(options, jobs.label, due)


def work(url: str, tuned: bool) -> None:
    _launch(url, poll=0.05 if tuned else 1.0)
    threading.Event().wait()


def _launch(url: str, poll: float = 1.0) -> None:
    DBOS(
        config={
            "name": "bench",
            "system_database_url": url,
            "executor_id": str(os.getpid()),
            "application_version": VERSION,
            "run_admin_server": False,
            "log_level": "WARNING",
        }
    )
    DBOS.launch()
    DBOS.register_queue(QUEUE, polling_interval_sec=poll)
