"""A retry, a countdown and an ETA wait as rows, and are otherwise what they are in Celery."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import MaxRetriesExceededError

from celery_durable.records import Due
from tests.integration.features_support import BOTH, features_bench, seen
from tests.integration.support import body_runs, row, status, wait_for_status, wait_until_asleep
from tests.nodes import Bench, Servers


@pytest.fixture(scope="module", params=BOTH)
def bench(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """One worker and one beat for all tests; a broker that sends again what it holds for five seconds."""
    folder = tmp_path_factory.mktemp("retry")
    options: dict[str, Any] = {}
    if request.param.startswith("redis"):
        options = {"broker_transport_options": {"visibility_timeout": 5}}
    with features_bench(request.param, servers, folder, queues="features,other", **options) as bench:
        yield bench


def runs(bench: Bench, task_id: str) -> dict[int, int]:
    """How often the body ran, by the number of its retry."""
    counts = {number: bench.witness.count(task_id, f"body {number}") for number in range(4)}
    return {number: count for number, count in counts.items() if count}


class TestRetry:
    def test_it_is_told_as_ever_and_keeps_the_journal(self, bench: Bench) -> None:
        result = bench.project.retries.delay("once", countdown=2.5)
        retrying = wait_for_status(bench, result.id, "retrying")
        bench.wait_for(lambda: result.state == "RETRY")
        bench.wait_for(bench.queue_is_empty)
        assert retrying.owner is None
        assert result.get(timeout=20) == ["once", 1]
        seen(bench, result.id, "task_postrun SUCCESS")
        assert bench.witness.steps(result.id) == [
            *("task_received", "task_prerun", "before_start", "body 0"),
            *("task_parked", "task_postrun IGNORED"),
            *("task_received", "task_woken", "task_prerun", "before_start", "body 0", "step of ['once']"),
            *("on_retry", "task_retry", "task_postrun RETRY"),
            *("task_received", "task_prerun", "before_start", "body 1"),
            *("on_success", "task_success", "after_return SUCCESS", "task_postrun SUCCESS"),
        ]

    @pytest.mark.parametrize("how", ["naive eta", "aware eta", "no throw"])
    def test_however_it_is_asked_for(self, bench: Bench, how: str) -> None:
        result = bench.project.retries.delay(how, countdown=2)
        retrying = wait_for_status(bench, result.id, "retrying")
        assert retrying.wake_at is not None
        assert 0 < (retrying.wake_at - datetime.now(timezone.utc)).total_seconds() < 2.1
        assert result.get(timeout=20) == [how, 1]
        assert runs(bench, result.id) == {0: 2, 1: 1}

    def test_other_arguments_start_the_journal_anew(self, bench: Bench) -> None:
        result = bench.project.retries.delay("new args")
        assert result.get(timeout=20) == ["newer args", 1]
        assert runs(bench, result.id) == {0: 2, 1: 2}
        seen(bench, result.id, "step of ['new args']")
        seen(bench, result.id, "step of ['newer args']")

    def test_other_options_travel(self, bench: Bench) -> None:
        result = bench.project.retries.delay("other queue")
        retrying = wait_for_status(bench, result.id, "retrying")
        assert retrying.message is not None
        assert retrying.message.routing_key == "other"
        assert '"priority": 3' in retrying.message.properties
        assert result.get(timeout=20) == ["other queue", 1]

    def test_retries_come_to_an_end_with_the_exception(self, bench: Bench) -> None:
        result = bench.project.retries.delay("exhausted")
        with pytest.raises(KeyError, match="never"):
            result.get(timeout=20)
        assert runs(bench, result.id) == {0: 2, 1: 1, 2: 1}
        wait_for_status(bench, result.id, "failed")
        seen(bench, result.id, "on_failure")
        seen(bench, result.id, "task_failure")
        seen(bench, result.id, "task_retry", 2)

    def test_or_with_celerys_own(self, bench: Bench) -> None:
        result = bench.project.retries.delay("exhausted, no exception")
        with pytest.raises(MaxRetriesExceededError):
            result.get(timeout=20)

    def test_one_that_cannot_be_sent_is_a_failure(self, bench: Bench) -> None:
        result = bench.project.retries.delay("unsendable")
        with pytest.raises(Exception, match="not JSON serializable"):
            result.get(timeout=20)
        wait_for_status(bench, result.id, "failed")
        seen(bench, result.id, "on_failure")

    def test_autoretry_with_backoff_around_a_sleep(self, bench: Bench) -> None:
        wins = bench.project.backs_off.delay(True)
        loses = bench.project.backs_off.delay(False)
        assert wins.get(timeout=25) == 2
        with pytest.raises(RuntimeError, match="not yet"):
            loses.get(timeout=25)
        for result in (wins, loses):
            assert runs(bench, result.id) == {0: 2, 1: 1, 2: 1}
            # The end of the sleep, and neither of the retries that come after it.
            seen(bench, result.id, "task_woken")
            second, third = (bench.witness.sightings(result.id, f"body {n}")[-1].time for n in (1, 2))
            assert third - second >= 2

    def test_an_hour_leaves_no_message_with_the_broker(self, bench: Bench) -> None:
        result = bench.project.retries.delay("once", countdown=3600)
        wait_for_status(bench, result.id, "retrying")
        bench.wait_for(bench.queue_is_empty)
        make_due(bench, result.id)
        assert result.get(timeout=20) == ["once", 1]
        assert runs(bench, result.id) == {0: 2, 1: 1}

    @pytest.mark.report("swallowed-control-flow")
    def test_decorators_and_handlers_of_exceptions_see_no_sleep(self, bench: Bench) -> None:
        result = bench.project.decorated.delay()
        assert result.get(timeout=20) == "slept"
        for step in ("decorator", "caught", "task_failure", "task_retry"):
            assert bench.witness.count(result.id, step) == 0
        seen(bench, result.id, "finally", 2)


class TestCountdown:
    def test_an_hour_is_a_row_and_no_message(self, bench: Bench) -> None:
        result = bench.project.quick.apply_async((7,), countdown=3600)
        scheduled = row(bench, result.id)
        assert scheduled is not None
        assert scheduled.status == "scheduled"
        assert bench.queue_is_empty()
        make_due(bench, result.id)
        assert result.get(timeout=15) == 7
        assert body_runs(bench, result) == 1

    @pytest.mark.parametrize("kind", ["naive", "aware", "text"])
    def test_an_eta_is_read_as_celery_reads_it(self, bench: Bench, kind: str) -> None:
        at = datetime.now(timezone.utc) + timedelta(hours=2)
        eta = {"naive": at.replace(tzinfo=None), "aware": at.astimezone(), "text": at.isoformat()}[kind]
        result = bench.project.quick.apply_async((7,), eta=eta)
        scheduled = row(bench, result.id)
        assert scheduled is not None
        assert scheduled.wake_at is not None
        assert abs(scheduled.wake_at - at) < timedelta(milliseconds=1)

    def test_it_is_the_caller_who_says_whether_it_is_a_row(self, bench: Bench) -> None:
        result = bench.project.left_to_celery.apply_async((7,), countdown=1)
        assert status(bench, result.id) is None
        assert result.get(timeout=15) == 7

    @pytest.mark.parametrize("how", ["countdown", "naive", "aware"])
    def test_of_a_producer_without_the_extension(self, bench: Bench, how: str) -> None:
        at = datetime.now(timezone.utc) + timedelta(hours=1)
        options = {
            "countdown": {"countdown": 3600},
            "naive": {"eta": at.replace(tzinfo=None)},
            "aware": {"eta": at.astimezone(timezone(timedelta(hours=5)))},
        }[how]
        with Celery("other", broker=bench.broker.url, set_as_current=False) as other:
            other.conf.task_default_queue = "features"
            sent = other.send_task(bench.project.nap.name, (5,), **options)
        scheduled = wait_for_status(bench, sent.id, "scheduled")
        assert scheduled.wake_at is not None
        assert abs(scheduled.wake_at - at) < timedelta(seconds=5)
        bench.wait_for(bench.queue_is_empty)
        make_due(bench, sent.id)
        result = bench.app().AsyncResult(sent.id)
        wait_until_asleep(bench, result)
        assert result.get(timeout=20) == 5
        seen(bench, sent.id, "body", 2)

    def test_by_name(self, bench: Bench) -> None:
        sent = bench.app().send_task(bench.project.quick.name, (5,), countdown=2)
        wait_for_status(bench, sent.id, "scheduled")
        bench.wait_for(bench.queue_is_empty)
        assert sent.get(timeout=20) == 5
        seen(bench, sent.id, "body")


def make_due(bench: Bench, task_id: str) -> None:
    """Let the time of a task come."""
    assert bench.app().durable.store.verdicts.move([task_id], Due())
