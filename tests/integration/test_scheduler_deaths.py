"""Schedulers that end in the midst of their work: nothing is lost, and nothing takes effect twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from celery_durable.records import Status
from celery_durable.store import Store
from tests.integration.forks import die, end, exit_code, fork, run_beat
from tests.integration.scheduler_support import count_where, is_due, latest, marked_as_sent, start_beat
from tests.nodes import Bench, on
from tests.store.rows import fill_asleep

KILLS = 20


@pytest.fixture
def store(bench: Bench) -> Iterator[Store]:
    """The store of the bench's app in this process."""
    bench.configure(durable_resend_delay=3600)
    store: Store = bench.app().durable.store  # type: ignore[attr-defined]
    store.upgrade()
    yield store
    store.dispose()


class TestKilled:
    @on("embedded-sqlite", "redis-postgres", "rabbitmq-postgres")
    def test_before_the_publish_after_it_and_after_the_note_each_timer_takes_effect_once(
        self, bench: Bench
    ) -> None:
        bench.configure(durable_batch_size=1, durable_resend_delay=3600)
        durable = bench.app().durable  # type: ignore[attr-defined]
        bench.worker(concurrency=2)
        results = [bench.project.doze.delay(number, 1.1) for number in range(3 * KILLS)]
        asleep = partial(count_where, durable.store, status=Status.SLEEPING)
        bench.wait_for(lambda: asleep() == len(results), 40, "all of them sleep")

        for dies in (before_publish, after_publish, after_note):
            bench.wait_for(lambda: durable.store.due.poll().due_in < 0, message="one is due")
            for _ in range(KILLS):
                pid = fork(partial(dies, durable), bench.folder / "forks.log")
                assert exit_code(pid) == -signal.SIGKILL

        bench.beat()
        assert sorted(result.get(timeout=40) for result in results) == list(range(3 * KILLS))
        assert bench.witness.count(step="woken") == 3 * KILLS
        assert all(bench.witness.steps(result.id) == ["body", "body", "woken"] for result in results)


def before_publish(durable: Any) -> None:
    dispatcher = durable.dispatcher()
    dispatcher._publisher.publish = lambda _batch: die()
    dispatcher.run_once()


def after_publish(durable: Any) -> None:
    durable.store.due.confirm = lambda *_: die()
    durable.dispatcher().run_once()


def after_note(durable: Any) -> None:
    durable.dispatcher().run_once()
    die()


class TestTerminated:
    @pytest.mark.report("missed-runs")
    @pytest.mark.timeout(180)
    @pytest.mark.parametrize(
        ("bench", "terms"),
        [("redis-postgres", 40), ("redis-sqlite", 12), ("rabbitmq-postgres", 12)],
        indirect=["bench"],
    )
    def test_again_and_again_in_the_midst_of_a_backlog_and_every_message_is_accounted_for(
        self, bench: Bench, store: Store, terms: int
    ) -> None:
        rows = 1500 * terms
        fill_asleep(store, rows, store.now() - timedelta(hours=1), spread=0)
        taken = [self.terminate_a_fork(bench, store) for _ in range(terms)]
        taken.append(self.terminate_a_process(bench, store))
        assert marked_as_sent(store) == sum(bench.broker.messages())
        all_others_are_due = partial(is_due, store, rows - marked_as_sent(store))
        bench.wait_for(all_others_are_due, 5, "what was taken and not sent is given back at once")
        assert sorted(taken)[terms // 2] < 1
        assert max(taken) < 5, "on a machine with other things to do"

    def terminate_a_fork(self, bench: Bench, store: Store) -> float:
        """Start a beat, stop it while it sends. How many seconds it took to stop."""
        before, log = latest(store), bench.folder / "forks.log"
        pid = fork(partial(run_beat, bench.app()), log)
        bench.wait_for(lambda: latest(store) > before, 30, "it is sending")
        time.sleep(random.uniform(0, 0.1))
        os.kill(pid, signal.SIGTERM)
        began = time.monotonic()
        assert exit_code(pid) == 0, log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()
        return time.monotonic() - began

    def terminate_a_process(self, bench: Bench, store: Store) -> float:
        """The same with one that has an interpreter of its own to shut down."""
        before = latest(store)
        beat = bench.beat(wait=False)
        bench.wait_for(lambda: latest(store) > before, 30, "it is sending")
        time.sleep(random.uniform(0, 0.1))
        beat.signal(signal.SIGTERM)
        began = time.monotonic()
        beat.wait(20)
        assert beat.exit_code == 0, beat.logs()
        assert "Traceback" not in beat.logs(), beat.logs()
        return time.monotonic() - began


class TestManyAtOnce:
    """Two hundred sleeps end at one instant, under three schedulers of which one is killed in the midst."""

    TASKS = 200
    PERIOD = 3.0
    #: The batch of the killed one comes back after ten seconds; the rest is the time to run all.
    BOUND = 15.0

    @pytest.mark.report("many-schedulers")
    @on("embedded-sqlite", "redis-postgres")
    def test_each_wakes_once_in_time_while_an_entry_keeps_its_beat(self, bench: Bench) -> None:
        entry = {"task": "tests.integration.proj.note", "schedule": self.PERIOD, "options": {"queue": "side"}}
        bench.configure(durable_batch_size=10, beat_schedule={"tick": entry})
        store: Store = bench.app().durable.store  # type: ignore[attr-defined]
        workers = [bench.worker(wait=False), bench.worker(pool="solo", queues="side", wait=False)]
        for worker in workers:
            worker.wait_until_ready()
        results = [bench.project.doze.delay(number, 600) for number in range(self.TASKS)]
        asleep = partial(count_where, store, status=Status.SLEEPING)
        bench.wait_for(lambda: asleep() == self.TASKS, message="all sleep")
        began = time.monotonic()
        beats = [start_beat(bench, number) for number in range(3)]
        due = datetime.now(timezone.utc) + timedelta(seconds=2)
        changed = bench.app().durable.postpone(status="sleeping", until=due)  # type: ignore[attr-defined]
        assert len(changed) == self.TASKS

        bench.wait_for(lambda: count_where(store, sends=0) < self.TASKS, message="wakes are being sent")
        self.kill_between_two_runs_of_the_entry(bench, store, beats.pop(0))
        bench.wait_for(lambda: bench.witness.count(step="woken") >= self.TASKS, message="all are awake")
        bench.wait_for(lambda: bench.witness.count(step="note") >= 4, message="the entry runs on")
        for pid in beats:
            os.kill(pid, signal.SIGTERM)
        assert [exit_code(pid) for pid in beats] == [0, 0]
        periods = (time.monotonic() - began) / self.PERIOD

        assert [result.get(timeout=10) for result in results] == list(range(self.TASKS))
        for result in results:
            assert bench.witness.steps(result.id) == ["body", "body", "woken"]
        woken = [seen.time - due.timestamp() for seen in bench.witness.sightings(step="woken")]
        assert min(woken) >= 0
        assert max(woken) < self.BOUND
        self.assert_it_kept_its_beat(bench, store, periods)

    def kill_between_two_runs_of_the_entry(self, bench: Bench, store: Store, pid: int) -> None:
        """While it sends; but not what the entry sends, which would come ten seconds late."""

        def is_frozen_between_two() -> bool:
            os.kill(pid, signal.SIGSTOP)
            if not count_where(store, status=Status.OUTBOX):
                return True
            os.kill(pid, signal.SIGCONT)
            return False

        bench.wait_for(is_frozen_between_two)
        end(pid)

    def assert_it_kept_its_beat(self, bench: Bench, store: Store, periods: float) -> None:
        runs = store.schedule.load(["tick"])[0]["tick"].total_run_count
        assert periods - 2 < runs <= periods
        waiting = partial(count_where, store, status=Status.OUTBOX)
        bench.wait_for(
            lambda: bench.witness.count(step="note") + waiting() == runs, message="once for each run"
        )
        times = [seen.time for seen in bench.witness.sightings(step="note")]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert all(abs(gap - self.PERIOD) < self.PERIOD / 2 for gap in gaps), gaps


class TestFrozenDatabase:
    """It hangs: connections stay open, and nothing is answered."""

    @on("redis-postgres")
    def test_a_scheduler_that_is_to_end_does_not_wait_for_it(self, bench: Bench, store: Store) -> None:
        assert bench.store_server is not None
        fill_asleep(store, 50_000, store.now() + timedelta(days=1), spread=0)
        idle = start_beat(bench, 1)
        bench.wait_for(lambda: store.schedule.seconds_since_tick() is not None, message="it ticks")
        bench.store_server.freeze()
        # Polls come ten times a second: one is under way.
        time.sleep(0.3)
        assert self.seconds_to_end(idle) < 2

        bench.store_server.thaw()
        with store.database.transaction() as connection:
            executions = store.context.schema.executions
            connection.execute(executions.update().values(wake_at=store.context.now(-3600)))
        before = latest(store)
        busy = start_beat(bench, 2)
        bench.wait_for(lambda: latest(store) > before, 30, "it is sending")
        bench.store_server.freeze()
        assert self.seconds_to_end(busy) < 4, "it waits a moment for what was sent to be noted"

    def seconds_to_end(self, pid: int) -> float:
        os.kill(pid, signal.SIGTERM)
        began = time.monotonic()
        assert exit_code(pid) == 0
        return time.monotonic() - began
