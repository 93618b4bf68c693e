"""Absurd: tasks that sleep in their bodies. Its schema comes with its command line tool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from absurd_sdk import Absurd

from benchmarks.marks import mark
from benchmarks.peers.run import Jobs

QUEUE = "bench"


def prepare(url: str) -> None:
    tool = str(Path(sys.executable).with_name("absurdctl"))
    for command in (["init", "-d", url], ["create-queue", "-d", url, QUEUE]):
        subprocess.run([tool, *command], check=True)


def fill(url: str, jobs: Jobs) -> None:
    client = Absurd(url, queue_name=QUEUE)
    for due in jobs.dues:
        client.spawn(jobs.what, {"label": jobs.label, "due": due}, queue=QUEUE)


def work(url: str, tuned: bool) -> None:
    client = Absurd(url, queue_name=QUEUE)
    for body in (noop, step, sleep, park):
        client.register_task(body.__name__)(body)
    if tuned:
        client.start_worker(batch_size=100, poll_interval=0.01)
    else:
        client.start_worker()


def noop(params: Any, _context: Any) -> None:
    """A task that does nothing."""
    mark(params["label"], params["due"])


def step(params: Any, context: Any) -> None:
    """A task with one step."""
    context.step("nothing", lambda: None)
    mark(params["label"], params["due"])


def sleep(params: Any, context: Any) -> None:
    """Sleeps, then tells of it."""
    context.sleep_until("sleep", params["due"])
    mark(params["label"], params["due"])


def park(params: Any, context: Any) -> None:
    """Goes to sleep at once."""
    mark(params["label"], params["due"])
    context.sleep_for("sleep", 86_400)
