"""Metrics and log fields of a real worker, told by the OpenTelemetry SDK."""

from __future__ import annotations

import os
import re
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from celery_durable.records import Claim
from tests.integration.support import status, wait_for_status
from tests.nodes import Bench, LocalProcess, on
from tests.nodes.ports import free_port
from tests.store.messages import delivery

ROOT = Path(__file__).parents[2]
NAME_IN_A_RULE = re.compile(r"celery_durable_\w+")


@pytest.fixture
def bench_module() -> str:
    return "tests.integration.metrics_proj"


def of_task(found: dict[str, list[Any]], name: str, task: str) -> Any:
    """The value of one instrument for one task."""
    (value,) = [value for attributes, value in found[f"celery_durable.{name}"] if attributes["task"] == task]
    return value


def is_dispatched(project: Any) -> bool:
    """Have the worker send what is due."""
    return project.dispatch.delay().get(timeout=20) is not None


def found_dead(project: Any) -> Any:
    """A task whose message comes again when the lease of its first run has run out, once too often."""
    arrival = replace(delivery("poison"), send_id=None)
    assert isinstance(project.durable.store.claims.claim(arrival, "another worker", 0.0, 1), Claim)
    return project.poison.apply_async(task_id="poison")


@on("embedded-sqlite")
def test_what_a_worker_does_is_counted_and_its_log_says_of_which_run(bench: Bench) -> None:
    worker = bench.worker(pool="solo")
    project = bench.project
    napped = project.nap.delay(1.2)
    wait_for_status(bench, napped.id, "sleeping")
    project.nap.apply_async((1.2,), task_id=napped.id)
    bench.wait_for(lambda: "dropped" in worker.logs(), message="the second send is refused")
    cancelled = project.lost.delay()
    quarantined = found_dead(project)
    ends = {cancelled.id: "cancelled", napped.id: "succeeded", quarantined.id: "quarantined"}
    bench.wait_for(
        lambda: is_dispatched(project) and {task_id: status(bench, task_id) for task_id in ends} == ends,
        message=f"{ends}",
    )

    found = project.collected.delay().get(timeout=20)
    assert of_task(found, "claims", "nap") == 2
    assert of_task(found, "claims", "lost") == 1
    assert of_task(found, "claims.refused", "nap") == 1
    assert of_task(found, "parks", "nap") == 1
    count, seconds = of_task(found, "wake.lateness", "nap")
    assert (count, 0 <= seconds < 15) == (1, True)
    assert of_task(found, "lease.losses", "lost") == 1
    assert of_task(found, "quarantines", "poison") == 1
    ((_, renewals),) = found["celery_durable.lease.renewals"]
    ((_, (margins, _)),) = found["celery_durable.lease.margin"]
    assert renewals == margins >= 1
    ((_, dispatches),) = found["celery_durable.dispatches"]
    ((_, (batches, _)),) = found["celery_durable.dispatch.duration"]
    assert dispatches >= batches >= 1
    assert "celery_durable.oldest_due.age" in found
    by_status = {attributes["status"]: value for attributes, value in found["celery_durable.executions"]}
    assert [by_status[name] for name in ("succeeded", "cancelled", "sleeping", "quarantined")] == [1, 1, 0, 1]

    assert_lines_say_of_which_run(worker.logs())


def assert_lines_say_of_which_run(log: str) -> None:
    assert "awake [token=2 at=2]" in log, "a line of the task's own code"
    assert "[token=1 at=2]" in next(line for line in log.splitlines() if "sleeps until" in line)
    assert "ready. [token=None at=None]" in log


def test_the_documented_exporter_serves_what_the_documented_alerts_look_at(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text().partition("\n## Prometheus")[2]
    program, rules = (re.search(f"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("python", "yaml"))
    port = free_port()
    (tmp_path / "proj").mkdir()
    (tmp_path / "proj" / "celery.py").write_text(
        "from celery import Celery\nfrom celery_durable import Durable\n"
        "app = Celery('proj')\ndurable = Durable(app)\ndurable.upgrade()\n"
    )
    (tmp_path / "proj" / "exporter.py").write_text(program.replace("9187", str(port)))
    exporter = LocalProcess(
        "exporter",
        [sys.executable, "-m", "proj.exporter"],
        folder=tmp_path,
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        ready=lambda: "celery_durable_" in scraped(port),
    )
    try:
        exporter.start()
        served = set(NAME_IN_A_RULE.findall(scraped(port)))
    finally:
        exporter.remove()
    watched = set(NAME_IN_A_RULE.findall(rules))
    assert watched
    assert watched <= served


def scraped(port: int) -> str:
    """What Prometheus would get; nothing while nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read(), "utf-8")
    except OSError:
        return ""
