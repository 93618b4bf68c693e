"""Steps and replay: what was journaled is not done again, and what went wrong is found out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_durable import StepFailed, StepLimitExceeded
from tests.integration.support import row, running_bench, wait_for_status, wait_until_asleep
from tests.nodes import Bench, Servers, on


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """A worker and a beat for all tests of this module that break nothing; small limits."""
    folder = tmp_path_factory.mktemp("running")
    limits = {"durable_step_limit": 20, "durable_payload_limit": 1000}
    with running_bench(request.param, servers, folder, **limits) as bench:
        yield bench


def journal(bench: Bench, task_id: str) -> list[str]:
    """The kinds of a task's journal entries."""
    found = row(bench, task_id)
    return [] if found is None else [entry.kind for entry in found.journal]


def warnings_about(bench: Bench, task_id: str) -> list[str]:
    """The worker's warnings and errors about one task."""
    lines = bench.processes[0].logs().splitlines()
    return [line for line in lines if task_id in line and (": WARNING/" in line or ": ERROR/" in line)]


@on("redis-sqlite", "redis-postgres", fixture="running")
class TestFailingSteps:
    def test_a_caught_failing_step_before_two_sleeps_runs_once(self, running: Bench) -> None:
        result = running.project.step_fails_then_two_sleeps.delay()
        assert result.get(timeout=15) == ["ValueError('no luck', 7)", "end"]
        assert running.witness.steps(result.id) == ["body", "failing", "body", "body", "last"]
        assert journal(running, result.id) == ["error", "sleep", "sleep", "step"]

    def test_an_exception_that_cannot_be_rebuilt_is_step_failed_from_the_first_run(
        self, running: Bench
    ) -> None:
        result = running.project.step_fails_oddly.delay()
        (caught,) = result.get(timeout=15)
        assert caught.startswith("StepFailed: A step failed with Unpicklable: 7: no luck")
        assert running.witness.steps(result.id) == ["body", "failing", caught, "body", caught]

    def test_a_result_that_cannot_be_encoded_fails_at_its_step(self, running: Bench) -> None:
        result = running.project.odd_step.delay(False)
        with pytest.raises(Exception, match="(?i)json serializable"):
            result.get(timeout=15)
        assert wait_for_status(running, result.id, "failed").journal == ()

    def test_such_a_failure_can_be_caught_and_slept_on(self, running: Bench) -> None:
        result = running.project.odd_step.delay(True)
        assert result.get(timeout=15) in ("EncodeError", "TypeError", "StepFailed")
        assert running.witness.steps(result.id) == ["odd"]
        assert journal(running, result.id) == ["error", "sleep"]


@on("redis-postgres", fixture="running")
class TestLimits:
    def test_as_many_steps_as_allowed(self, running: Bench) -> None:
        assert running.project.many_steps.delay(20).get(timeout=15) == 20

    def test_one_step_more(self, running: Bench) -> None:
        result = running.project.many_steps.delay(21)
        with pytest.raises(StepLimitExceeded, match="journaled 20 entries"):
            result.get(timeout=15)
        assert running.witness.count(result.id, "step") == 20

    def test_a_payload_over_the_limit(self, running: Bench) -> None:
        result = running.project.large_step.delay(2000)
        with pytest.raises(ValueError, match="2002 bytes, over the limit of 1000"):
            result.get(timeout=15)
        assert wait_for_status(running, result.id, "failed").journal == ()

    def test_the_limit_does_not_bind_the_return_value(self, running: Bench) -> None:
        assert len(running.project.end_as.delay("x" * 5000).get(timeout=15)) == 5000


@on("redis-postgres", fixture="running")
class TestValues:
    def test_the_first_run_gets_what_a_replay_gets(self, running: Bench) -> None:
        result = running.project.decoded.delay()
        assert result.get(timeout=15) == ["[1, [2, 3]]"]
        assert running.witness.steps(result.id) == ["tuple", "[1, [2, 3]]", "[1, [2, 3]]"]


@on("redis-sqlite", "redis-postgres", fixture="running")
class TestSwallowed:
    @pytest.mark.report("swallowed-control-flow")
    @pytest.mark.parametrize("then", ["return", "step", "raise"])
    def test_a_bare_except_cannot_keep_a_task_awake(self, running: Bench, then: str) -> None:
        result = running.project.swallows.delay(then)
        wait_until_asleep(running, result)
        assert result.get(timeout=15) == "in time"
        assert running.witness.steps(result.id) == ["body", "swallowed", "body", "after"]
        wait_for_status(running, result.id, "succeeded")
        expected = 0 if then == "step" else 1
        warnings = warnings_about(running, result.id)
        assert len([line for line in warnings if "is dropped" in line]) == expected
        assert len(warnings) == expected

    def test_a_finally_that_raises_after_the_park_is_dropped_with_one_warning(self, running: Bench) -> None:
        result = running.project.raises_in_finally.delay()
        assert result.get(timeout=15) == "awake"
        assert running.witness.count(result.id, "body") == 2
        (warning,) = warnings_about(running, result.id)
        assert "the cleanup failed" in warning
        assert "is dropped" in warning

    @pytest.mark.report("swallowed-control-flow")
    def test_except_exception_and_autoretry_do_not_see_a_sleep(self, running: Bench) -> None:
        result = running.project.catches_exceptions.delay()
        assert result.get(timeout=15) == "awake"
        assert running.witness.steps(result.id) == ["body", "finally", "body", "finally"]
        assert warnings_about(running, result.id) == []


@on("redis-postgres", fixture="running")
class TestFailedInThisProcess:
    def test_the_caller_can_rebuild_the_error(self, running: Bench) -> None:
        """Errors of ours go through a result store and back."""
        result: Any = running.project.raise_step_failed.delay()
        with pytest.raises(StepFailed) as caught:
            result.get(timeout=15)
        assert caught.value.type_name == "Unpicklable"
