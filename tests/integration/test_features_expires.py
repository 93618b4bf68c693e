"""``expires`` limits the first start, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, chord
from celery.exceptions import ChordError, TaskRevokedError

from tests.integration.features_support import BOTH, features_bench, seen
from tests.integration.support import status, wait_for_status, wait_until_asleep
from tests.nodes import Bench, Servers

TOKYO = timezone(timedelta(hours=9))


@pytest.fixture(scope="module", params=BOTH)
def bench(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """One worker and one beat for all tests of this module."""
    folder = tmp_path_factory.mktemp("expires")
    with features_bench(request.param, servers, folder, timezone="Asia/Tokyo") as bench:
        yield bench


def in_(seconds: float, kind: str) -> Any:
    """A time limit, as people write it."""
    now = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    times = {
        "relative": seconds,
        "aware": now.astimezone(TOKYO),
        # Celery reads a naive time as UTC, whatever the app's timezone is.
        "naive": now.replace(tzinfo=None),
    }
    return times[kind]


def assert_expired(bench: Bench, result: Any) -> None:
    """It never started, and that was told once."""
    with pytest.raises(TaskRevokedError, match="expired"):
        result.get(timeout=15)
    assert result.state == "REVOKED"
    wait_for_status(bench, result.id, "cancelled")
    assert bench.witness.count(result.id, "body") == 0
    seen(bench, result.id, "task_revoked")


class TestFirstStart:
    @pytest.mark.report("expiry")
    @pytest.mark.parametrize("kind", ["relative", "aware", "naive"])
    def test_what_has_not_started_in_time_is_revoked_once(self, bench: Bench, kind: str) -> None:
        """Nobody reads its queue until it has expired."""
        queue = f"late-{kind}"
        result = bench.project.nap.apply_async((1,), queue=queue, expires=in_(0.5, kind))
        good = bench.project.nap.apply_async((2,), queue=queue, expires=in_(600, kind))
        deadline = datetime.now(timezone.utc) + timedelta(seconds=0.6)
        bench.wait_for(lambda: datetime.now(timezone.utc) > deadline)
        worker = bench.processes[0]
        bench.app().control.add_consumer(queue, destination=[worker.hostname], reply=True, timeout=5)
        assert_expired(bench, result)
        assert good.get(timeout=15) == 2

    @pytest.mark.report("expiry")
    def test_a_chord_is_told(self, bench: Bench) -> None:
        t = bench.project
        expired = t.nap.s(1).set(countdown=600, expires=1)
        result = chord([expired, t.plain.s(2)])(t.collect.s().on_error(t.errback.s()))
        with pytest.raises(TaskRevokedError):
            result.get(timeout=20)
        bench.wait_for(result.ready)
        assert isinstance(result.result, ChordError)
        seen(bench, result.id, "errback ChordError")
        assert_expired(bench, result.parent.results[0])

    @pytest.mark.report("expiry")
    @pytest.mark.parametrize("kind", ["relative", "aware", "naive"])
    def test_what_waits_for_a_later_time_is_revoked_when_it_expires(self, bench: Bench, kind: str) -> None:
        result = bench.project.nap.apply_async((1,), countdown=600, expires=in_(1.5, kind))
        assert wait_for_status(bench, result.id, "scheduled").wake_at is not None
        assert_expired(bench, result)

    def test_of_a_producer_without_the_extension(self, bench: Bench) -> None:
        with Celery("other", broker=bench.broker.url, set_as_current=False) as other:
            other.conf.task_default_queue = "features"
            eta = datetime.now(timezone.utc) + timedelta(seconds=600)
            sent = other.send_task(bench.project.nap.name, (1,), eta=eta, expires=2)
        wait_for_status(bench, sent.id, "scheduled")
        assert_expired(bench, bench.app().AsyncResult(sent.id))


class TestStarted:
    @pytest.mark.report("expiry")
    @pytest.mark.parametrize("kind", ["relative", "aware", "naive"])
    def test_what_has_started_does_not_expire_asleep(self, bench: Bench, kind: str) -> None:
        result = bench.project.nap.apply_async((3, 2.5), expires=in_(2, kind))
        asleep = wait_until_asleep(bench, result)
        assert asleep.message is not None
        assert "expiration" not in asleep.message.properties
        assert result.get(timeout=20) == 3
        seen(bench, result.id, "body", 2)
        assert bench.witness.count(result.id, "task_revoked") == 0

    def test_nor_while_it_waits_for_its_retry(self, bench: Bench) -> None:
        result = bench.project.retries.apply_async(("once",), {"countdown": 2}, expires=2)
        assert result.get(timeout=20) == ["once", 1]
        assert bench.witness.count(result.id, "task_revoked") == 0


class TestNoScheduler:
    @pytest.mark.report("expiry")
    def test_what_expired_meanwhile_is_told_by_the_next_one_and_what_had_started_goes_on(
        self, bench: Bench
    ) -> None:
        t, beat = bench.project, bench.processes[1]
        started = t.nap.apply_async((1, 3), expires=1)
        due = wait_until_asleep(bench, started).wake_at
        beat.kill()
        # It expires before it is due; it is due first, and nobody sends it in time.
        early = t.nap.apply_async((2,), countdown=600, expires=1)
        late = t.nap.s(3).set(countdown=0.2, expires=1)
        result = chord([late, t.plain.s(4)])(t.collect.s().on_error(t.errback.s()))
        member = result.parent.results[0]
        for waiting in (early, member):
            wait_for_status(bench, waiting.id, "scheduled")
        assert due is not None
        passed = max(due, datetime.now(timezone.utc) + timedelta(seconds=1.2))
        bench.wait_for(lambda: datetime.now(timezone.utc) > passed, message="all times have passed")
        assert [status(bench, r.id) for r in (started, early, member)] == ["sleeping"] + ["scheduled"] * 2
        beat.start()

        assert started.get(timeout=20) == 1
        assert bench.witness.count(started.id, "task_revoked") == 0
        for expired in (early, member):
            assert_expired(bench, expired)
        bench.wait_for(result.ready)
        assert isinstance(result.result, ChordError)
        seen(bench, result.id, "errback ChordError")
