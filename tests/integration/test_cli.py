"""The command line as operators run it: a process beside real workers, and beside dead ones."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_durable.cli import durable
from tests.integration.features_support import features_bench, seen
from tests.integration.support import status, wait_for_status, wait_until_asleep
from tests.nodes import Bench, Servers, on

#: A process of the command line takes seconds to start on a small machine.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def live(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One worker and one beat for all tests of this module but those that break something."""
    with features_bench("redis-postgres", servers, tmp_path_factory.mktemp("cli")) as live:
        yield live


def run(bench: Bench, *arguments: str, code: int = 0) -> Result:
    """`celery -A … durable …` within this process, which ends with this exit code."""
    context = CLIContext(app=bench.app(), no_color=True, workdir=None)
    result = CliRunner().invoke(durable, arguments, obj=context)
    assert result.exit_code == code, result.output
    return result


def process(bench: Bench, *arguments: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """The same as a process of its own, which never ends with a traceback."""
    done = bench.celery("durable", *arguments, env=env, timeout=100)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def answer(bench: Bench, *arguments: str, code: int = 0) -> Any:
    return json.loads(run(bench, *arguments, "--json", code=code).stdout)


def one_line(text: str) -> str:
    assert text.startswith("Error: ")
    assert text.count("\n") == 1
    return text


class TestBesideAWorker:
    def test_what_sleeps_is_listed_shown_and_woken(self, live: Bench) -> None:
        result = live.project.nap.delay(7, 600)
        wait_until_asleep(live, result)
        listed = answer(live, "list", "--status", "sleeping", "--text", result.id)
        assert [item["task_id"] for item in listed] == [result.id]
        shown = answer(live, "show", result.id)
        assert [entry["kind"] for entry in shown["journal"]] == ["step", "sleep"]
        assert shown["due_at"] == listed[0]["due_at"]
        run(live, "wake", result.id)
        assert result.get(timeout=20) == 7

    def test_what_is_moved_wakes_at_its_new_time(self, live: Bench) -> None:
        results = [live.project.nap.apply_async((n, 600), task_id=f"moved-{n}") for n in range(3)]
        before = [wait_until_asleep(live, result).due_at for result in results]
        assert answer(live, "postpone", "--text", "moved-", "--by", "-599s")["postponed"] == 3
        durable = live.app().durable
        for number, result in enumerate(results):
            assert result.get(timeout=30) == number
            entry = durable.get(result.id).journal[1]
            assert (before[number] - entry.due_at).total_seconds() == 599
            # Not before it, by the clock of the database.
            assert durable.get(result.id).journal[2].recorded_at >= entry.due_at

    def test_a_cancel_by_filter_reaches_the_callers(self, live: Bench) -> None:
        results = [live.project.nap.apply_async((n, 600), task_id=f"unwanted-{n}") for n in range(3)]
        for result in results:
            wait_until_asleep(live, result)
        assert answer(live, "cancel", "--text", "unwanted-", "--dry-run")["would_be_cancelled"] == 3
        assert answer(live, "cancel", "--text", "unwanted-")["cancelled"] == 3
        for result in results:
            wait_for_status(live, result.id, "cancelled")
            assert result.state == "REVOKED"
            seen(live, result.id, "task_revoked")

    def test_what_killed_its_workers_is_released(self, live: Bench) -> None:
        result = live.project.crashes.delay()
        wait_for_status(live, result.id, "quarantined", timeout=60)
        assert "its worker died once" in run(live, "show", result.id).stdout
        run(live, "release", result.id)
        seen(live, result.id, "body", times=2)
        wait_for_status(live, result.id, "quarantined", timeout=60)

    def test_what_cannot_be_is_one_line_and_no_success(self, live: Bench) -> None:
        result = live.project.quick.delay(1)
        assert result.get(timeout=20) == 1
        wait_for_status(live, result.id, "succeeded")
        assert "it has ended" in one_line(run(live, "wake", result.id, code=1).stderr)
        assert "no durable execution" in one_line(run(live, "show", "unknown", code=1).stderr)
        assert "'noon'" in one_line(run(live, "postpone", "x", "--until", "noon", code=2).stderr)

    def test_the_check_of_a_healthy_deployment(self, live: Bench) -> None:
        levels = {f["check"]: f["level"] for f in answer(live, "check", "--strict")}
        assert set(levels.values()) == {"ok"}
        assert answer(live, "stats")["scheduler_seen"] is not None


class TestByItself:
    @on("redis-postgres")
    def test_it_works_with_everything_else_down_and_says_so_when_the_database_is(self, bench: Bench) -> None:
        assert "before, there were none" in process(bench, "upgrade").stdout
        result = bench.project.end_as.apply_async(("value",), countdown=600)
        listed = json.loads(process(bench, "list", "--json").stdout)
        assert [item["task_id"] for item in listed] == [result.id]
        process(bench, "cancel", result.id)
        assert status(bench, result.id) == "ending"
        away = "postgresql+psycopg://proj:hunter2@127.0.0.1:1/proj"
        done = process(bench, "list", code=3, CELERY_DURABLE_DATABASE_URL=away)
        assert "hunter2" not in one_line(done.stderr)

    @on("redis-postgres")
    def test_its_scheduler_wakes_what_is_due_beside_another_beat(self, bench: Bench) -> None:
        worker = bench.worker(wait=False)
        bench.process("durable", "scheduler", name="scheduler", ready="is starting", wait=False)
        worker.wait_until_ready()
        result = bench.project.doze.delay(7, 1.2)
        assert result.get(timeout=30) == 7
