"""Broker or database are away over the due time of timers and of beat entries: nothing is lost or twice."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from celery_durable.store import Store
from tests.integration.forks import exit_code
from tests.integration.scheduler_support import latest, marked_as_sent, start_beat
from tests.integration.support import row, start_worker_and_beat, wait_until_asleep
from tests.nodes import Beat, Bench, on
from tests.store.rows import fill_asleep

#: Seconds between two runs of the beat entry, and those that the timers sleep.
PERIOD, SLEEP = 3.0, 3.0


def store_of(bench: Bench) -> Store:
    """The store of the bench's app in this process."""
    store: Store = bench.app().durable.store  # type: ignore[attr-defined]
    return store


def configure_entry(bench: Bench) -> None:
    """A durable task every few seconds: of a plain one an outage in mid-publish may send a copy."""
    entry = {"task": "tests.integration.proj.double", "schedule": PERIOD, "args": (21,)}
    bench.configure(beat_schedule={"double": entry})


def fall_asleep(bench: Bench) -> list[Any]:
    """Three timers that sleep."""
    results = [bench.project.doze.delay(number, SLEEP) for number in range(3)]
    for result in results:
        wait_until_asleep(bench, result)
    return results


def runs(bench: Bench) -> int:
    """How often the entry has been due, as its row says."""
    found = store_of(bench).schedule.load(["double"])[0].get("double")
    return found.total_run_count if found is not None else 0


def assert_each_ran_once(bench: Bench, results: list[Any], timeout: float) -> None:
    """Timers and entry have run, and ran once."""
    assert [result.get(timeout=timeout) for result in results] == [0, 1, 2]
    assert [bench.witness.steps(result.id) for result in results] == [["body", "body", "woken"]] * 3

    def all_ran() -> bool:
        counted = runs(bench)
        return bench.witness.count(step="doubled") == counted == runs(bench)

    bench.wait_for(all_ran, timeout, "the entry ran once for each time that it was due")


def last_due(bench: Bench, results: list[Any]) -> float:
    """When the last of them is due."""
    times = [found.wake_at for result in results if (found := row(bench, result.id)) is not None]
    assert len(times) == len(results)
    return max(wake_at.timestamp() for wake_at in times if wake_at is not None)


def start_again(bench: Bench) -> None:
    """Start the database again, and forget this process's own connections to the old one."""
    assert bench.store_server is not None
    bench.store_server.start()
    store_of(bench).dispose()


def said(log: str, what: str) -> tuple[int, int]:
    """How often a log says that something is away, and that it is back."""
    return log.count(f"{what} cannot be reached"), log.count(f"{what} is back")


def changes(beat: Beat, what: str) -> tuple[int, int]:
    """The same of a beat."""
    return said(beat.logs(), what)


class TestBroker:
    @pytest.mark.timeout(180)
    @on("redis-postgres", "rabbitmq-postgres")
    def test_stopped_then_frozen_over_the_due_time_of_timers_and_an_entry(self, bench: Bench) -> None:
        server = bench.broker_server
        assert server is not None
        configure_entry(bench)
        _, beat = start_worker_and_beat(bench)
        away = partial(changes, beat, "The broker")

        results = fall_asleep(bench)
        due, before = last_due(bench, results), runs(bench)
        server.kill()
        bench.wait_for(lambda: time.time() > due and runs(bench) > before, message="all were due")
        bench.wait_for(lambda: away() == (1, 0), message="it is away, and that is said")
        server.start()
        assert_each_ran_once(bench, results, 20)
        assert away() == (1, 1)

        results = fall_asleep(bench)
        due, before = last_due(bench, results), runs(bench)
        server.freeze()
        bench.wait_for(lambda: time.time() > due and runs(bench) > before, message="all were due")
        bench.wait_for(lambda: away() == (2, 1), message="it hangs, and that is said")
        server.thaw()
        assert_each_ran_once(bench, results, 20)
        assert away() == (2, 2)
        assert beat.running


class TestDatabase:
    @pytest.mark.report("database-restart")
    @pytest.mark.timeout(180)
    @on("redis-postgres")
    def test_away_over_the_due_time_of_timers_and_an_entry(self, bench: Bench) -> None:
        server = bench.store_server
        assert server is not None
        configure_entry(bench)
        _, beat = start_worker_and_beat(bench)
        results = fall_asleep(bench)
        due = last_due(bench, results)
        server.kill()
        bench.wait_for(lambda: time.time() > due + 1, message="the timers' time is over")
        start_again(bench)
        assert_each_ran_once(bench, results, 20)
        assert changes(beat, "The database") == (1, 1)
        assert "Traceback" not in beat.logs()

    @pytest.mark.report("database-restart")
    @on("redis-postgres")
    def test_restarted_at_once_again_and_again_in_the_midst_of_a_drain(self, bench: Bench) -> None:
        bench.configure(durable_resend_delay=3600)
        server, store, rows = bench.store_server, store_of(bench), 20_000
        assert server is not None
        store.upgrade()
        fill_asleep(store, rows, store.now() - timedelta(hours=1), spread=0)
        beat = start_beat(bench, 0)
        for _ in range(3):
            before = latest(store)
            bench.wait_for(lambda before=before: latest(store) > before, 30, "it is sending")  # type: ignore[misc]
            server.kill()
            start_again(bench)
        # What was taken by a transaction whose answer was lost comes back after ten seconds.
        bench.wait_for(lambda: marked_as_sent(store) == rows, 60, "all are sent")
        assert sum(bench.broker.messages()) == rows
        os.kill(beat, signal.SIGTERM)
        assert exit_code(beat) == 0


class TestAtStart:
    @pytest.mark.report("first-poll")
    @on("redis-postgres")
    def test_neither_is_there_and_each_is_waited_for(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.configure(durable_resend_delay=3600)
        broker, database, store = bench.broker_server, bench.store_server, store_of(bench)
        assert broker is not None
        assert database is not None
        health, log = bench.folder / "health.json", bench.folder / "beat-0.log"
        monkeypatch.setenv("CELERY_DURABLE_HEALTH_FILE", str(health))

        def is_said(state: str, line: str) -> bool:
            return (
                health.exists()
                and json.loads(health.read_text())["state"] == state
                and line in log.read_text()
            )

        store.upgrade()
        fill_asleep(store, 10, store.now(), spread=0)
        broker.kill()
        database.kill()
        beat = start_beat(bench, 0)
        bench.wait_for(partial(is_said, "database away", "The database cannot be reached"))
        start_again(bench)
        bench.wait_for(partial(is_said, "broker away", "The broker cannot be reached"))
        broker.start()
        bench.wait_for(partial(is_said, "ok", "The broker is back"))
        bench.wait_for(lambda: marked_as_sent(store) == 10, message="what was due is sent")
        assert sum(bench.broker.messages()) == 10
        for what in ("The database", "The broker"):
            assert said(log.read_text(), what) == (1, 1)
        os.kill(beat, signal.SIGTERM)
        assert exit_code(beat) == 0
        assert not health.exists()


class TestPollInterval:
    @on("redis-postgres")
    def test_a_sleep_that_is_written_while_the_scheduler_rests_is_not_overslept(self, bench: Bench) -> None:
        """Neither a long poll interval nor beat's own is a reason to be late where the database notifies."""
        bench.configure(durable_poll_interval=30, beat_max_loop_interval=300)
        start_worker_and_beat(bench)
        server = bench.store_server
        assert server is not None
        listening = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN %'"
        bench.wait_for(lambda: server.execute(listening), message="it listens")
        result = bench.project.doze.delay(7, 4)
        due = wait_until_asleep(bench, result).wake_at
        assert due is not None
        assert result.get(timeout=20) == 7
        (woken,) = bench.witness.sightings(result.id, "woken")
        assert 0 <= woken.time - due.timestamp() < 1
