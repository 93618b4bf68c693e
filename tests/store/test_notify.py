"""Hints: whoever waits for the next due row hears of a nearer one, where the database can tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event

from celery_durable.records import Claim, Due
from celery_durable.store import Store
from celery_durable.store.notify import ECHO, Hints, Silence
from tests.nodes import Servers
from tests.nodes.waiting import wait_for
from tests.store.messages import delivery, schedule

WITHIN = 5.0


@pytest.fixture
def writer(open_store: Callable[..., Store]) -> Store:
    """A worker's store, where the schedulers poll every five seconds."""
    return open_store(notify_within=WITHIN)


@pytest.fixture
def hints(open_store: Callable[..., Store]) -> Iterator[Hints]:
    """What a scheduler waits for, in another process."""
    hints = open_store(notify_within=WITHIN).hints()
    hints.arm()
    hints.wait(0.01)
    hints.arm()
    yield hints
    hints.close()


def hears(hints: Hints, write: Callable[[], Any], seconds: float = 10.0) -> bool:
    """Whether a wait ends at once when something is written while it lasts."""
    timer = threading.Timer(0.1, write)
    timer.start()
    began = time.monotonic()
    heard = hints.wait(seconds)
    timer.join()
    return heard and time.monotonic() - began < seconds / 2


@contextmanager
def notifications(store: Store) -> Iterator[list[str]]:
    """The notifications that a store sends within the block."""
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "pg_notify" in statement:
            sent.append(statement)

    event.listen(store.database.engine, "before_cursor_execute", note)
    yield sent
    event.remove(store.database.engine, "before_cursor_execute", note)


def claim(store: Store, task_id: str) -> Claim:
    granted = store.claims.claim(delivery(task_id), "worker", 60.0, 3)
    assert isinstance(granted, Claim)
    return granted


class TestHearing:
    """On both databases: a wait ends when somebody else writes what is due soon."""

    def test_a_countdown(self, writer: Store, hints: Hints) -> None:
        assert hears(hints, lambda: schedule(writer, "a", due_in=1))

    def test_a_sleep(self, writer: Store, hints: Hints) -> None:
        key = claim(writer, "a").key
        hints.arm()
        assert hears(hints, lambda: writer.runs.park(key, Due(seconds=1)))

    def test_a_lease_that_is_handed_back(self, writer: Store, hints: Hints) -> None:
        key = claim(writer, "a").key
        hints.arm()
        assert hears(hints, lambda: writer.leases.hand_back(key))

    def test_a_worker_that_is_known_to_be_dead(self, writer: Store, hints: Hints) -> None:
        key = claim(writer, "a").key
        hints.arm()
        assert hears(hints, lambda: writer.leases.recover(key, 3))

    def test_an_instant(self, writer: Store, hints: Hints) -> None:
        soon = Due(at=writer.now() + timedelta(seconds=2))
        assert hears(hints, lambda: writer.claims.schedule(delivery("a"), soon))

    def test_nothing_is_heard_where_nothing_is_written(self, writer: Store, hints: Hints) -> None:
        assert not hints.wait(0.2)

    def test_what_was_written_between_a_poll_and_the_wait_is_heard(self, writer: Store, hints: Hints) -> None:
        hints.arm()
        schedule(writer, "a", due_in=1)
        began = time.monotonic()
        assert hints.wait(10)
        assert time.monotonic() - began < 5


class TestPostgres:
    @pytest.fixture
    def store_url(self, postgres_url: str) -> str:
        return postgres_url

    def test_what_is_due_after_the_next_poll_is_not_told(self, writer: Store) -> None:
        with notifications(writer) as sent:
            schedule(writer, "a", due_in=WITHIN + 1)
            key = claim(writer, "b").key
            writer.runs.park(key, Due(seconds=3600))
        assert sent == []

    def test_claims_and_heartbeats_are_not_told(self, writer: Store) -> None:
        with notifications(writer) as sent:
            key = claim(writer, "a").key
            writer.leases.renew([key], 60.0)
        assert sent == []

    def test_a_burst_is_told_once(self, writer: Store) -> None:
        with notifications(writer) as sent:
            for _ in range(20):
                writer.context.nearer(Due(seconds=1))
        # Twenty take no longer than a few of the coalescing times, even on a slow machine.
        assert 1 <= len(sent) < 10

    def test_who_heard_something_looks_once_more_for_what_was_coalesced(
        self, writer: Store, hints: Hints
    ) -> None:
        schedule(writer, "a", due_in=1)
        assert hints.wait(10)
        began = time.monotonic()
        assert hints.wait(10)
        assert time.monotonic() - began < ECHO + 1
        assert not hints.wait(0.1)

    def test_a_far_instant_is_told_to_nobody_by_the_databases_clock(
        self, writer: Store, hints: Hints
    ) -> None:
        writer.claims.schedule(delivery("a"), Due(at=writer.now() + timedelta(seconds=WITHIN + 60)))
        assert not hints.wait(0.2)

    def test_another_namespace_is_not_told(self, open_store: Callable[..., Store], hints: Hints) -> None:
        schedule(open_store(namespace="others", notify_within=WITHIN), "a", due_in=1)
        assert not hints.wait(0.2)

    def test_a_broken_connection_is_a_reason_to_look_and_is_made_anew(
        self, writer: Store, hints: Hints, servers: Servers
    ) -> None:
        servers.postgres.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        )
        assert hints.wait(10), "the end of the connection"
        wait_for(lambda: hears(hints, lambda: schedule(writer, str(time.monotonic()), due_in=1)))

    def test_a_writer_whose_notification_fails_does_not_fail(
        self, writer: Store, postgres_url: str, servers: Servers
    ) -> None:
        claimed = claim(writer, "a").key
        server, name = servers.postgres, postgres_url.rpartition("/")[2]
        server.execute(
            "CREATE OR REPLACE FUNCTION public.pg_notify(text, text) RETURNS void LANGUAGE plpgsql"
            " AS $$ BEGIN RAISE EXCEPTION 'no'; END $$",
            database=name,
        )
        server.execute(f'ALTER DATABASE "{name}" SET search_path = public, pg_catalog')
        writer.database.dispose()
        assert writer.runs.park(claimed, Due(seconds=1)) is not None


class TestSilence:
    def test_without_notify_the_time_passes(self, open_store: Callable[..., Store]) -> None:
        writer = open_store()
        hints = open_store().hints()
        assert isinstance(hints, Silence)
        schedule(writer, "a", due_in=0.1)
        assert not hints.wait(0.05)
