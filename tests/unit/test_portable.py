"""A program that only sends runs where workers do not: nothing of a POSIX system is needed to import us."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_POSIX = """
import os, signal, sys
import billiard.pool, celery.worker.request, kombu.transport.memory, logging, multiprocessing.util
sys.modules["fcntl"] = sys.modules["redis"] = sys.modules["gevent"] = None
for name in ("SIGURG", "SIGSTOP", "SIGKILL", "pthread_kill"):
    delattr(signal, name)
del os.register_at_fork, os.set_blocking
"""


def run(program: str, tmp_path) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that has lost what a POSIX system has, and what an extra brings."""
    command = [sys.executable, "-c", WITHOUT_POSIX + program]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_it_can_be_imported_and_a_task_be_sent_with_a_countdown(tmp_path) -> None:
    done = run(
        """
from celery import Celery
from celery_durable import Durable, DurableTask
app = Celery("proj", broker="memory://")
durable = Durable(app, database_url="sqlite:///store.db")
durable.upgrade()
@app.task(base=DurableTask)
def task(): pass
task.apply_async(countdown=600)
assert durable.count() == 1
""",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_only_the_embedded_broker_needs_more_and_says_so(tmp_path) -> None:
    done = run(
        """
from celery import Celery
from celery_durable import Durable
app = Celery("proj")
Durable(app)
with app.connection_for_write() as connection:
    connection.default_channel
""",
        tmp_path,
    )
    assert done.returncode != 0
    assert "the embedded broker needs a POSIX system" in done.stderr.strip().splitlines()[-1]
