"""pytest-celery's setup works without Docker, on each broker and with each result store."""

from __future__ import annotations

import pytest
from pytest_celery import CeleryTestSetup  # type: ignore[import-untyped]
from pytest_celery.vendors.worker.tasks import (  # type: ignore[import-untyped]
    add,
    identity,
    ping,
    sleep,
)

RESULT_TIMEOUT = 30

on_redis = pytest.mark.parametrize("celery_broker", ["celery_redis_broker"], indirect=True)
with_postgres = pytest.mark.parametrize("celery_backend", ["celery_postgres_backend"], indirect=True)


@pytest.fixture
def default_worker_command(default_worker_command: list[str]) -> list[str]:
    """Without the second at the start in which a worker looks for others."""
    return [*default_worker_command, "--without-mingle", "--without-gossip"]


class TestRoundTrip:
    def test_a_result_comes_back(self, celery_setup: CeleryTestSetup) -> None:
        assert celery_setup.ready(ping=True, control=True, docker=True)
        assert add.s(2, 3).apply_async().get(timeout=RESULT_TIMEOUT) == 5

    @with_postgres
    def test_a_killed_worker_starts_again_and_goes_on(self, celery_setup: CeleryTestSetup) -> None:
        worker = celery_setup.worker
        worker.kill()
        assert worker.container.status == "exited"
        result = identity.s("kept").apply_async()
        worker.restart()
        assert result.get(timeout=RESULT_TIMEOUT) == "kept"

    @with_postgres
    def test_a_killed_broker_starts_again(self, celery_setup: CeleryTestSetup) -> None:
        celery_setup.broker.kill()
        celery_setup.broker.restart()
        assert ping.s().apply_async().get(timeout=RESULT_TIMEOUT) == "pong"


@on_redis
@with_postgres
class TestNodes:
    def test_a_killed_result_store_keeps_its_results(self, celery_setup: CeleryTestSetup) -> None:
        result = add.s(2, 3).apply_async()
        assert result.get(timeout=RESULT_TIMEOUT) == 5
        celery_setup.backend.kill()
        celery_setup.backend.restart()
        again = celery_setup.app.AsyncResult(result.id)
        assert again.get(timeout=RESULT_TIMEOUT) == 5

    def test_the_result_store_can_be_asked_directly(self, celery_setup: CeleryTestSetup) -> None:
        result = add.s(2, 3).apply_async()
        result.get(timeout=RESULT_TIMEOUT)
        with celery_setup.backend.container.client as connection:
            rows = connection.execute("SELECT task_id, status FROM celery_taskmeta").fetchall()
        assert rows == [(result.id, "SUCCESS")]

    def test_logs_tell_the_task_and_the_node_its_name(self, celery_setup: CeleryTestSetup) -> None:
        worker = celery_setup.worker
        result = add.s(2, 3).apply_async()
        worker.wait_for_log(f"{result.id}] succeeded", timeout=RESULT_TIMEOUT)
        assert list(celery_setup.app.control.ping([worker.hostname()])[0]) == [worker.hostname()]

    def test_ready_after_a_restart_means_the_new_process(self, celery_setup: CeleryTestSetup) -> None:
        process = celery_setup.worker.container.process
        celery_setup.worker.restart(force=True)
        assert "ready." in process.logs()
        assert celery_setup.worker.logs().count("ready.") == 2

    def test_the_process_list_is_the_worker_and_its_pool(self, celery_setup: CeleryTestSetup) -> None:
        sleep.s(0).apply_async().get(timeout=RESULT_TIMEOUT)
        infos = celery_setup.worker.get_running_processes_info(["pid", "cmdline"])
        assert infos[0]["pid"] == celery_setup.worker.container.process.pid
        assert len(infos) >= 2

    def test_a_command_runs_beside_the_worker(self, celery_setup: CeleryTestSetup) -> None:
        code, output = celery_setup.worker.container.exec_run("python -c 'import app; print(1)'")
        assert (code, output.strip()[-1:]) == (0, b"1")
