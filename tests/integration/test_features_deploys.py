"""A deploy may take away what sleeping tasks need: their rows stay, and fail visibly only at a limit."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chord
from celery.exceptions import ChordError, NotRegistered
from kombu.exceptions import DecodeError

from celery_durable.records import Due
from tests.integration.features_support import PROJECT, Copies, seen
from tests.integration.support import row, wait_for_status, wait_until_asleep
from tests.nodes import Bench, Worker, on

#: A release without one task, without the project's own serializer, and with a changed signature.
NARROW = {"FEATURES_WITHOUT": "nap", "FEATURES_NARROW": "1"}


@pytest.fixture
def bench_module() -> str:
    return PROJECT


@pytest.fixture
def worker(bench: Bench) -> Worker:
    """A worker of the first release, and a beat; a wake that nobody claims is sent again after a second."""
    bench.configure(durable_resend_delay=1)
    worker = bench.worker(wait=False)
    bench.beat()
    worker.wait_until_ready()
    return worker


class TestUnknownToThisRelease:
    @on("redis-postgres", "rabbitmq-postgres")
    def test_it_waits_for_a_worker_that_understands_it(self, bench: Bench, worker: Worker) -> None:
        t = bench.project
        names = t.nap.delay(1, 600)
        types = t.quick.apply_async((2,), serializer="own", countdown=600)
        changed = t.with_signature.apply_async((3,), link_error=t.errback.s())
        wait_until_asleep(bench, names)
        wait_until_asleep(bench, changed)
        worker.kill()
        narrow = bench.worker(name="narrow", env=NARROW)
        make_due(bench, names, types, changed)
        fresh = t.nap.delay(4, 1.1)

        with pytest.raises(TypeError, match="with_another_signature"):
            changed.get(timeout=20)
        seen(bench, changed.id, "errback TypeError")
        for result in (names, types, fresh):
            bench.wait_for(lambda result=result: sends(bench, result.id) >= 2)
            assert not result.ready()
            assert f"{result.id}] is not understood by this worker" in narrow.logs()
        assert bench.witness.count(names.id, "after") == 0

        narrow.kill()
        worker.start()
        assert [result.get(timeout=30) for result in (names, types, fresh)] == [1, 2, 4]
        seen(bench, names.id, "after")
        seen(bench, fresh.id, "after")

    @on("redis-postgres", "rabbitmq-postgres")
    def test_at_the_limit_it_fails_and_that_is_told(self, bench: Bench, worker: Worker) -> None:
        t = bench.project
        alone = t.nap.apply_async((1, 600), link_error=t.errback.s())
        cancelled = t.nap.delay(2, 600)
        own = t.quick.apply_async((3,), serializer="own", countdown=600)
        result = chord([t.nap.s(1, 600), t.plain.s(2)])(t.collect.s().on_error(t.errback.s()))
        member = result.parent.results[0]
        for sleeper in (alone, cancelled, member):
            wait_until_asleep(bench, sleeper)
        worker.kill()
        bench.worker(name="narrow", env={**NARROW, "FEATURES_LIMIT": "2"})
        make_due(bench, alone, own, member)
        cancelled.revoke()

        with pytest.raises(NotRegistered, match="nap"):
            alone.get(timeout=30)
        seen(bench, alone.id, "errback NotRegistered")
        wait_for_status(bench, alone.id, "failed")
        bench.wait_for(result.ready)
        assert isinstance(result.result, ChordError)
        seen(bench, result.id, "errback ChordError")
        with pytest.raises(Exception, match="application/x-own"):
            own.get(timeout=20)
        wait_for_status(bench, own.id, "failed")
        wait_for_status(bench, cancelled.id, "cancelled")
        assert cancelled.state == "REVOKED"


class TestUnreadable:
    """A body that the worker can decode where it gets it, and its pool cannot."""

    @pytest.mark.parametrize("pool", ["prefork", "solo", "threads", "gevent"])
    @on("redis-postgres")
    def test_it_fails_once_at_the_limit_and_a_copy_of_it_harms_nobody(self, bench: Bench, pool: str) -> None:
        bench.configure(durable_resend_delay=1, accept_content=["json", "pickle"])
        worker = bench.worker(env={"FEATURES_LIMIT": "2"}, pool=pool, wait=False)
        bench.beat()
        worker.wait_until_ready()
        t = bench.project
        nap = t.nap.s(t.Brittle(), 600).set(serializer="pickle", link_error=[t.errback.s()])
        woken, cancelled, asleep = (nap.apply_async() for _ in range(3))
        for result in (woken, cancelled, asleep):
            wait_until_asleep(bench, result)
        before = row(bench, asleep.id)
        bench.witness.saw("brittle", "breaks")
        fresh = t.quick.apply_async((t.Brittle(),), serializer="pickle")
        Copies(bench, asleep.id).send()
        cancelled.revoke()
        make_due(bench, woken)

        for result in (woken, fresh):
            with pytest.raises(DecodeError, match="Brittle has no such attribute any more"):
                result.get(timeout=20)
            assert wait_for_status(bench, result.id, "failed").wake_at is None
            seen(bench, result.id, "task_failure")
            assert f"{result.id}] is not understood by this worker" in worker.logs()
        seen(bench, woken.id, "errback DecodeError")
        assert bench.witness.count(woken.id, "after") == bench.witness.count(fresh.id, "body") == 0
        wait_for_status(bench, cancelled.id, "cancelled")
        assert cancelled.state == "REVOKED"
        bench.wait_for(bench.queue_is_empty)
        assert row(bench, asleep.id) == before
        assert asleep.state == "SLEEPING"

    @pytest.mark.parametrize("pool", ["prefork", "solo", "threads"])
    @on("redis-postgres")
    def test_what_nobody_can_decode_fails_at_the_limit_and_the_worker_goes_on(
        self, bench: Bench, pool: str
    ) -> None:
        bench.configure(durable_resend_delay=1)
        worker = bench.worker(env={"FEATURES_LIMIT": "2"}, pool=pool, wait=False)
        bench.beat()
        worker.wait_until_ready()
        t = bench.project
        broken = t.quick.apply_async((1,), countdown=600)
        store = bench.app().durable.store
        executions = store.context.schema.executions
        with store.database.transaction() as connection:
            connection.execute(executions.update().values(body=b"[[1], {}, \xff"))
        make_due(bench, broken)

        with pytest.raises(DecodeError):
            broken.get(timeout=20)
        assert wait_for_status(bench, broken.id, "failed").wake_at is None
        assert worker.logs().count(f"{broken.id}] is not understood by this worker") == 1
        assert t.quick.delay(2).get(timeout=20) == 2
        bench.wait_for(bench.queue_is_empty)
        assert bench.witness.count(broken.id, "body") == 0


def make_due(bench: Bench, *results: Any) -> None:
    """Let the time of sleeping tasks come."""
    task_ids = [result.id for result in results]
    assert len(bench.app().durable.store.verdicts.move(task_ids, Due())) == len(task_ids)


def sends(bench: Bench, task_id: str) -> int:
    """How often a wake was sent that nobody has claimed."""
    found = row(bench, task_id)
    return 0 if found is None else found.sends
