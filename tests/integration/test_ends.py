"""How a durable task comes to its end, and who hears of it, once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import uuid
from celery.result import AsyncResult

from tests.integration.support import (
    assert_no_traceback,
    running_bench,
    start_worker_and_beat,
    status,
    wait_for_status,
    wait_until_asleep,
)
from tests.nodes import Bench, Servers, on


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """A worker and a beat for all tests of this module that break nothing."""
    with running_bench(request.param, servers, tmp_path_factory.mktemp("running")) as bench:
        yield bench


@on("embedded-sqlite", "redis-postgres", "rabbitmq-postgres", fixture="running")
class TestValue:
    @pytest.mark.parametrize("seconds", [0, 1.2])
    def test_a_value_reaches_the_caller_and_the_callbacks(self, running: Bench, seconds: float) -> None:
        task_id = uuid()
        callback = running.project.note.s(about=task_id, what="callback")
        result = running.project.end_as.apply_async(("value", seconds), task_id=task_id, link=callback)
        assert result.get(timeout=15) == "value"
        assert wait_for_status(running, task_id, "succeeded").outcome is not None
        running.wait_for(lambda: running.witness.count(task_id, "callback"))
        bodies = ["body"] * (2 if seconds else 1)
        assert sorted(running.witness.steps(task_id)) == [*bodies, "callback", "on_success"]


@on("embedded-sqlite", "redis-postgres", "rabbitmq-postgres", fixture="running")
class TestException:
    @pytest.mark.parametrize("seconds", [0, 1.2])
    def test_an_exception_is_a_failure_with_its_traceback(self, running: Bench, seconds: float) -> None:
        failed = running.project.failed
        result = running.project.end_as.apply_async(("exception", seconds), link_error=failed.s())
        with pytest.raises(KeyError) as caught:
            result.get(timeout=15)
        assert caught.value.args == ("missing", 3)
        assert result.state == "FAILURE"
        assert "raise KeyError" in result.traceback
        assert "celery_durable" not in result.traceback.splitlines()[-1]
        wait_for_status(running, result.id, "failed")
        running.wait_for(lambda: running.witness.count(result.id, "errback KeyError"))
        bodies = ["body"] * (2 if seconds else 1)
        assert sorted(running.witness.steps(result.id)) == [*bodies, "errback KeyError", "on_failure"]

    def test_an_exception_that_cannot_be_rebuilt_fails_as_celery_lets_it(self, running: Bench) -> None:
        result = running.project.end_as.delay("odd exception", 1.2)
        with pytest.raises(Exception, match="7: no luck"):
            result.get(timeout=15)
        assert wait_for_status(running, result.id, "failed").token == 2

    def test_what_is_no_exception_and_leaves_the_body_is_a_failure_in_the_row_too(
        self, running: Bench
    ) -> None:
        result = running.project.end_as.delay("abort")
        with pytest.raises(RuntimeError, match="Abort"):
            result.get(timeout=15)
        assert wait_for_status(running, result.id, "failed", timeout=5).owner is None
        assert running.witness.steps(result.id) == ["body"]

    def test_a_value_that_cannot_be_encoded_is_a_failure(self, running: Bench) -> None:
        result = running.project.end_as.delay("odd value")
        with pytest.raises(Exception, match="(?i)json serializable"):
            result.get(timeout=15)
        wait_for_status(running, result.id, "failed")
        assert running.witness.count(result.id, "on_failure") == 1


@on("redis-postgres", "rabbitmq-postgres", fixture="running")
class TestQuietEnds:
    @pytest.mark.parametrize("how", ["ignore", "reject"])
    @pytest.mark.parametrize("seconds", [0, 1.2])
    def test_ignore_and_reject_mean_what_they_mean_to_a_plain_task(
        self, running: Bench, how: str, seconds: float
    ) -> None:
        """Celery 5.7 tells nobody of `Ignore`, and of a `Reject` that it is a failure."""
        project, task_id, plain_id = running.project, uuid(), uuid()
        callback = project.note.s(about=task_id, what="callback")
        result = project.end_as.apply_async((how, seconds), task_id=task_id, link=callback)
        plain = project.plain_end.apply_async((how,), task_id=plain_id)
        running.wait_for(lambda: running.witness.count(plain_id, "body"))
        assert wait_for_status(running, task_id, "succeeded", "failed").wake_at is None
        running.wait_for(running.queue_is_empty)
        if how == "reject":
            running.wait_for(lambda: plain.state == result.state == "FAILURE")
        else:
            assert (plain.state, result.state in ("PENDING", "SLEEPING")) == ("PENDING", True)
        assert running.witness.steps(task_id) == ["body"] * (2 if seconds else 1)

    def test_an_end_that_the_pool_cannot_report_is_no_failure(self, running: Bench) -> None:
        result = running.project.end_as.delay("odd ignore")
        wait_for_status(running, result.id, "succeeded")
        # By then the worker's main process has heard what the pool said.
        assert running.project.end_as.delay("value", 1.2).get(timeout=15) == "value"
        assert result.state == "PENDING"

    @pytest.mark.parametrize("how", ["requeue", "system exit", "os exit"])
    def test_what_is_no_end_runs_again(self, running: Bench, how: str) -> None:
        result = running.project.end_once.delay(how)
        assert result.get(timeout=20) == "second run"
        wait_for_status(running, result.id, "succeeded")
        assert running.witness.steps(result.id) == ["body", "step", "body", "on_success"]


@on("redis-postgres", "embedded-sqlite", fixture="running")
class TestResults:
    def test_ignore_result_stores_nothing(self, running: Bench) -> None:
        result = running.project.forget.delay(1.2)
        row = wait_for_status(running, result.id, "sleeping")
        assert row.owner is None
        assert stored(running, result.id) is None
        row = wait_for_status(running, result.id, "succeeded")
        assert running.witness.steps(result.id) == ["body", "body", "woken"]
        assert stored(running, result.id) is None
        assert row.outcome is not None
        assert row.outcome.payload is None, "nobody gets the value"

    def test_ignore_result_of_one_call_stores_nothing(self, running: Bench) -> None:
        result = running.project.doze.apply_async((1, 1.2), ignore_result=True)
        wait_for_status(running, result.id, "succeeded")
        assert stored(running, result.id) is None

    def test_started_is_told_where_it_is_asked_for(self, running: Bench) -> None:
        result = running.project.tracked.delay()
        running.wait_for(lambda: result.state == "STARTED", message="it has started")
        running.witness.saw(result.id, "go")
        assert result.get(timeout=15) == "tracked"


def stored(bench: Bench, task_id: str) -> Any:
    """What the result store itself has of a task."""
    backend = bench.app().backend
    if hasattr(backend, "get_key_for_task"):
        return backend.get(backend.get_key_for_task(task_id))
    meta = backend.get_task_meta(task_id, cache=False)
    return None if meta["status"] == "PENDING" else meta


class TestNoResultStore:
    @on("redis-postgres")
    def test_a_durable_task_needs_none(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        bench.env["CELERY_RESULT_BACKEND"] = "disabled://"
        monkeypatch.setenv("CELERY_RESULT_BACKEND", "disabled://")
        start_worker_and_beat(bench)
        note = bench.project.note
        result = bench.project.nap.apply_async((1.2,), link=note.s(what="callback"))
        wait_for_status(bench, result.id, "succeeded")
        assert bench.witness.steps(result.id) == ["body", "before", "body", "after", "on_success"]
        bench.wait_for(lambda: bench.witness.count(step="callback"))
        result = bench.project.end_as.apply_async(("exception",), link_error=bench.project.failed.s())
        wait_for_status(bench, result.id, "failed")
        bench.wait_for(lambda: bench.witness.count(result.id, "errback KeyError"))


class TestResultStoreAway:
    """The result cannot be stored at the end: the outcome is kept and told later, once."""

    @pytest.fixture
    def slow_to_despair(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A proxy in front of the workers' result store; they do not wait long for it."""
        url = bench.env["CELERY_RESULT_BACKEND"]
        proxy = bench.proxy(url)
        bench.configure(
            result_backend_transport_options={"retry_policy": {"max_retries": 1, "timeout": 1}},
            redis_socket_connect_timeout=1,
            redis_socket_timeout=1,
        )
        bench.env["CELERY_RESULT_BACKEND"] = proxy.url
        return proxy

    @on("redis-postgres")
    @pytest.mark.parametrize("how", ["value", "exception"])
    def test_an_outcome_is_told_when_the_store_is_back(
        self, bench: Bench, slow_to_despair: Any, how: str
    ) -> None:
        worker, _ = start_worker_and_beat(bench)
        result: AsyncResult[Any] = bench.project.end_as.apply_async(
            (how, 2), link=bench.project.note.s(what="callback"), link_error=bench.project.failed.s()
        )
        wait_until_asleep(bench, result)
        slow_to_despair.refuse()
        wait_for_status(bench, result.id, "ending", timeout=15)
        bench.wait_for(lambda: "comes back" in worker.logs(), message="telling has failed")
        assert result.state == "SLEEPING"
        assert status(bench, result.id) == "ending"
        slow_to_despair.heal()
        value = result.get(timeout=30, propagate=False)
        assert repr(value) == {"value": "'value'", "exception": "KeyError('missing', 3)"}[how]
        row = wait_for_status(bench, result.id, "succeeded", "failed")
        assert row.crashes == 0
        heard = {"value": ["on_success"], "exception": ["errback KeyError", "on_failure"]}[how]
        bench.wait_for(lambda: set(heard) <= set(bench.witness.steps(result.id)))
        assert sorted(bench.witness.steps(result.id)) == ["body", "body", *heard]
        assert bench.witness.count(step="callback") == (1 if how == "value" else 0)


class TestHealthyLogs:
    @on("embedded-sqlite", "rabbitmq-postgres")
    def test_a_run_of_everything_prints_no_traceback(self, bench: Bench) -> None:
        start_worker_and_beat(bench)
        project = bench.project
        results = [
            project.nap.delay(1.2),
            project.flaky.delay(1.2),
            project.replaced.delay(4),
            project.doze.apply_async((4, 1.2), countdown=1.2),
            project.add.delay(1, 2),
            (project.doze.s(1, 1.2) | project.add.s(1)).delay(),
        ]
        values = [result.get(timeout=20) for result in results]
        assert values == [["first", "second", 2], [7, 2], 9, 4, 3, 2]
        bench.wait_for(bench.queue_is_empty)
        for process in bench.processes:
            assert process.stop() == 0
        assert_no_traceback(bench)
