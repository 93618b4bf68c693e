"""A worker that runs in a thread of a program, as Celery's own ``celery_worker`` fixture starts it: solo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.nodes.workers import ROOT

PROGRAM = """
import threading
import time
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery_durable import Durable, DurableTask, LeaseLost, current_lease

app = Celery("proj", broker="memory://", backend="cache+memory://")
durable = Durable(app, database_url="sqlite:///durable.sqlite", lease_ttl=3, heartbeat_interval=0.1)
leases, left = [], threading.Event()

@app.task(base=DurableTask)
def add(x, y):
    return x + y

@app.task(base=DurableTask)
def runs_on():
    leases.append(current_lease())
    try:
        while True:
            time.sleep(0.01)
    finally:
        left.set()

with start_worker(app, perform_ping_check=False):
    print("sum", add.delay(2, 3).get(timeout=10), flush=True)
    result = runs_on.delay()
    while not leases:
        time.sleep(0.01)
    durable.store.leases.hand_back(leases[0].key)
    print("left", left.wait(10), flush=True)
    print("then", add.delay(3, 4).get(timeout=10), flush=True)
"""


def test_it_runs_durable_tasks_and_stops_one_that_has_lost_its_lease(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == ["sum 5", "left True", "then 7"], done.stderr
    assert "Traceback" not in done.stderr
