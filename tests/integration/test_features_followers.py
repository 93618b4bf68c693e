"""Those who come after a task start if and only if its end was accepted, whatever dies or is away."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from celery import chord
from kombu.utils.uuid import uuid

from tests.integration.features_support import BOTH, PROJECT, features_bench, halt_at, seen
from tests.integration.support import status, wait_for_status
from tests.nodes import Bench, Servers, on

#: Where nothing had been sent when the worker died, or it was noted what had.
ONCE = ("before end", "after end", "noted", "before telling", "told", "before finish", "finished")


@pytest.fixture
def bench_module() -> str:
    return PROJECT


@pytest.fixture(scope="module", params=["redis-postgres"])
def features(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """One worker and one beat for the tests in which only pool processes die."""
    settings = {"durable_lease_ttl": 3, "durable_heartbeat_interval": 1}
    with features_bench(request.param, servers, tmp_path_factory.mktemp("ends"), **settings) as bench:
        yield bench


class Parent:
    """A task with followers of both kinds: two callbacks, and the next of a chain."""

    def __init__(self, bench: Bench, task: Any = None) -> None:
        t = bench.project
        self._bench = bench
        self.id = uuid()
        self.durable, self.plain = t.quick.s(), t.plain.s()
        links = [self.durable.freeze(), self.plain.freeze()]
        self.durable_id, self.plain_id = (link.id for link in links)
        self.canvas = (task or t.quick).s(self.id).set(task_id=self.id, link=[self.durable, self.plain])
        self.last: Any = None

    def send(self) -> Parent:
        self.last = (self.canvas | self._bench.project.quick.s()).delay()
        return self

    def assert_done(self, *, plain: int) -> None:
        """Both callbacks and the chain have run: durable ones once, the plain one so often."""
        assert self.last.get(timeout=30) == self.id
        bench = self._bench
        wait_for_status(bench, self.id, "succeeded")
        wait_for_status(bench, self.last.id, "succeeded")
        wait_for_status(bench, self.durable_id, "succeeded")
        assert bench.witness.count(self.last.id, "body") == 1
        assert bench.witness.count(self.durable_id, "body") == 1
        seen(bench, self.plain_id, "plain", plain)


class TestWorkerKilled:
    """Every point of the end; what had not been sent is sent ten seconds later."""

    def test_followers_run_once(self, features: Bench) -> None:
        parents = {point: Parent(features) for point in ONCE}
        for point, parent in parents.items():
            halt_at(features, point, parent.id)
            parent.send()
        for point, parent in parents.items():
            parent.assert_done(plain=1)
            assert features.witness.count(parent.id, f"kill {point}") == 1
            assert features.witness.count(parent.id, "body") == (2 if point == "before end" else 1)

    def test_killed_between_publish_and_note_a_durable_follower_runs_once_a_plain_one_again(
        self, features: Bench
    ) -> None:
        parent = Parent(features)
        halt_at(features, "published", parent.id)
        parent.send()
        parent.assert_done(plain=2)
        assert features.witness.count(parent.id, "body") == 1

    @pytest.mark.parametrize("point", ["told", "before finish"])
    def test_a_chord_counts_a_member_once_that_dies_after_it_was_told(
        self, features: Bench, point: str
    ) -> None:
        t = features.project
        member = t.quick.s(1).set(task_id=uuid())
        halt_at(features, point, member.options["task_id"])
        result = chord([member, t.nap.s(2), t.plain.s(3)])(t.collect.s())
        assert result.get(timeout=20) == [1, 2, 3]
        wait_for_status(features, member.options["task_id"], "succeeded")
        seen(features, result.id, "collect")

    def test_an_only_member_that_dies_after_it_was_told_starts_a_durable_body_once(
        self, features: Bench
    ) -> None:
        t = features.project
        member = t.quick.s(1).set(task_id=uuid())
        halt_at(features, "told", member.options["task_id"])
        result = chord([member])(t.gather.s())
        assert result.get(timeout=20) == [1]
        wait_for_status(features, member.options["task_id"], "succeeded")
        seen(features, result.id, "gathered")


class TestWorkerFrozen:
    """A process that comes back late finds that another one has gone on."""

    def test_followers_run_once(self, features: Bench) -> None:
        for point, bodies in (("before end", 2), ("before telling", 1)):
            parent = Parent(features)
            halt_at(features, point, parent.id, "freeze")
            parent.send()
            parent.assert_done(plain=1)
            (frozen,) = features.witness.sightings(parent.id, f"freeze {point}")
            os.kill(frozen.pid, signal.SIGCONT)
            bench_goes_on = Parent(features).send()
            bench_goes_on.assert_done(plain=1)
            parent.assert_done(plain=1)
            assert features.witness.count(parent.id, "body") == bodies


class TestBrokerAway:
    @pytest.mark.report("broker-reconnect")
    @on(*BOTH)
    def test_a_task_that_succeeds_meanwhile_stays_a_success_and_its_followers_are_sent_later(
        self, bench: Bench
    ) -> None:
        proxy = bench.proxy(bench.broker.url)
        bench.worker(env={"CELERY_BROKER_URL": proxy.url}, wait=False)
        bench.beat(env={"CELERY_BROKER_URL": proxy.url}, wait=False)
        parent = Parent(bench, bench.project.waits).send()
        seen(bench, parent.id, "body", timeout=30)
        proxy.refuse()
        bench.witness.saw(parent.id, "go")
        first = parent.last.parent
        bench.wait_for(first.ready)
        assert first.get() == parent.id
        assert status(bench, parent.durable_id) == "scheduled"
        assert bench.witness.count(parent.plain_id) == 0
        proxy.heal()
        parent.assert_done(plain=1)
        assert first.get() == parent.id
        assert bench.witness.count(parent.id, "body") == 1


class TestAFollowerThatCannotBeBuilt:
    def test_it_fails_the_task_before_anything_is_written(self, features: Bench) -> None:
        t = features.project
        good = t.plain.s().set(task_id=uuid())
        bad = t.plain.s().set(serializer="no such serializer")
        result = t.quick.apply_async((1,), link=[good, bad], link_error=[t.errback.s()])
        with pytest.raises(Exception, match="no such serializer"):
            result.get(timeout=20)
        seen(features, result.id, "errback SerializerNotInstalled")
        wait_for_status(features, result.id, "failed")
        assert features.witness.count(good.options["task_id"]) == 0
