"""What the integration tests ask of a bench, in their own words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from celery_durable import Execution, ExecutionNotFound
from tests.nodes import DEPLOYMENTS, Beat, Bench, Servers, Worker

PROJECT = "tests.integration.proj"


def start_worker_and_beat(bench: Bench, **options: Any) -> tuple[Worker, Beat]:
    """A worker and a beat, started at the same time."""
    worker = bench.worker(wait=False, **options)
    beat = bench.beat(wait=False)
    worker.wait_until_ready()
    beat.wait_until_ready()
    return worker, beat


@contextmanager
def running_bench(
    deployment: str, servers: Servers, folder: Path, *, pool: str = "prefork", **settings: Any
) -> Iterator[Bench]:
    """A bench with a worker of 2 and a beat, for many tests that break nothing."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        bench = Bench(DEPLOYMENTS[deployment], servers, folder, PROJECT, monkeypatch)
        try:
            if settings:
                bench.configure(**settings)
            start_worker_and_beat(bench, pool=pool)
            yield bench
        finally:
            bench.close()


def row(bench: Bench, task_id: str) -> Execution | None:
    """The row of a task."""
    try:
        found: Execution = bench.app().durable.get(task_id)
    except ExecutionNotFound:
        return None
    return found


def status(bench: Bench, task_id: str) -> str | None:
    """The status of a task's row; None where there is none."""
    found = row(bench, task_id)
    return None if found is None else found.status


def wait_for_status(bench: Bench, task_id: str, *wanted: str, timeout: float = 20) -> Execution:
    """Wait until the row of a task has one of these statuses."""
    message = f"{task_id} is {' or '.join(wanted)}"
    bench.wait_for(lambda: status(bench, task_id) in wanted, timeout, message)
    found = row(bench, task_id)
    assert found is not None
    return found


def is_asleep(bench: Bench, result: Any) -> bool:
    """Whether a task sleeps, as its row and its caller see it."""
    return status(bench, result.id) == "sleeping" and result.state == "SLEEPING"


def wait_until_asleep(bench: Bench, result: Any, timeout: float = 20) -> Execution:
    """Wait until a task sleeps, in the database and in the result store."""
    bench.wait_for(lambda: is_asleep(bench, result), timeout, f"{result.id} sleeps")
    found = row(bench, result.id)
    assert found is not None
    return found


def body_runs(bench: Bench, result: Any) -> int:
    """How often the body of a task was entered."""
    return bench.witness.count(result.id, "body")


def assert_no_traceback(bench: Bench) -> None:
    """Nothing that this bench's processes have printed looks like an error that nobody expected."""
    for process in bench.processes:
        log = process.logs(all_starts=True)
        assert "Traceback" not in log, process.report()
        assert "CRITICAL" not in log, process.report()
