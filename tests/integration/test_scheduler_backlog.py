"""Three schedulers drain a large backlog, and one of them dies in the midst of a batch."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from celery_durable.publisher import Published, Publisher
from celery_durable.records import Outgoing
from celery_durable.rules import DISPATCH_LEASE
from celery_durable.scheduler.state import HEALTH_VARIABLE
from celery_durable.store import Store
from tests.integration.forks import die, exit_code, fork, run_beat
from tests.integration.scheduler_support import count_where, marked_as_sent
from tests.nodes import Bench, on
from tests.store.rows import fill_asleep

ROWS, BATCH = 10_000, 100
POLL_INTERVAL = 0.1
#: The batch at which the one dies: all three are in the midst of it then.
LAST = 5


@pytest.fixture
def store(bench: Bench) -> Iterator[Store]:
    """The store of the bench's app in this process, with ten thousand rows that sleep for an hour."""
    bench.configure(durable_resend_delay=3600, durable_batch_size=BATCH, durable_poll_interval=POLL_INTERVAL)
    store: Store = bench.app().durable.store  # type: ignore[attr-defined]
    store.upgrade()
    fill_asleep(store, ROWS, store.now() + timedelta(hours=1), spread=0)
    yield store
    store.dispose()


@pytest.mark.report("many-schedulers", "one-dispatcher")
@pytest.mark.parametrize(("dies", "copies"), [("before the publish", 1), ("after the publish", 2)])
@on("redis-postgres", "rabbitmq-postgres")
def test_each_row_is_sent_and_only_what_the_dead_one_was_sending_may_be_sent_again(
    bench: Bench, store: Store, dies: str, copies: int
) -> None:
    victim = start(bench, "victim", dies)
    survivors = [start(bench, "second"), start(bench, "third")]
    make_all_due(store)
    assert exit_code(victim) == -signal.SIGKILL
    died = time.monotonic()
    *_, its_last = sent_by(bench, "victim")
    assert count_where(store, wake_at=taken_until(store, its_last[0])) == len(its_last) == BATCH
    assert marked_as_sent(store) < ROWS - BATCH, "there is something left to take over"

    others_are_sent = partial(is_marked, store, ROWS - BATCH)
    bench.wait_for(others_are_sent, DISPATCH_LEASE - 1, "what the dead one had not begun is not held up")
    left = died + DISPATCH_LEASE + POLL_INTERVAL + 1 - time.monotonic()
    bench.wait_for(partial(is_marked, store, ROWS), left, "its batch is sent as soon as it is free")
    for pid in survivors:
        os.kill(pid, signal.SIGTERM)
    assert [exit_code(pid) for pid in survivors] == [0, 0]

    by_survivors = Counter(
        key for name in ("second", "third") for batch in sent_by(bench, name) for key in batch
    )
    assert set(by_survivors.values()) == {1}, "no two that live send the same row"
    by_all = by_survivors + Counter(key for batch in sent_by(bench, "victim") for key in batch)
    assert len(by_all) == ROWS
    assert {key for key, times in by_all.items() if times > 1} == set(its_last)
    assert sum(bench.broker.messages()) == ROWS + (copies - 1) * BATCH
    assert count_where(store, sends=1) == ROWS - BATCH
    assert count_where(store, sends=2) == BATCH


def start(bench: Bench, name: str, dies: str | None = None) -> int:
    """A beat in a fork that has made its first round, and writes down what it sends."""
    health = bench.folder / f"{name}.health"

    def body() -> None:
        os.environ[HEALTH_VARIABLE] = str(health)
        watch_what_is_sent(bench.folder / f"{name}.sent", dies)
        run_beat(bench.app())

    pid = fork(body, bench.folder / f"{name}.log")
    bench.wait_for(health.exists, message=f"{name} has looked for what is due")
    return pid


def watch_what_is_sent(file: Path, dies: str | None) -> None:
    """For a fork: note each batch before it is published; be killed at the last one."""
    publish: Callable[[Any, Sequence[Outgoing]], Published] = Publisher.publish

    def watched(self: Publisher, batch: Sequence[Outgoing]) -> Published:
        with file.open("a") as lines:
            lines.write(json.dumps([item.key for item in batch]) + "\n")
        is_last = dies is not None and len(file.read_text().splitlines()) == LAST
        if is_last and dies == "before the publish":
            die()
        published = publish(self, batch)
        if is_last:
            die()
        return published

    Publisher.publish = watched  # type: ignore[method-assign]


def sent_by(bench: Bench, name: str) -> list[list[str]]:
    """The keys of the rows in each batch of a scheduler."""
    return [json.loads(line) for line in (bench.folder / f"{name}.sent").read_text().splitlines()]


def make_all_due(store: Store) -> None:
    executions = store.context.schema.executions
    with store.database.transaction() as connection:
        connection.execute(executions.update().values(wake_at=store.context.now(-1)))


def taken_until(store: Store, key: str) -> datetime:
    """The end of the dispatch lease of a row."""
    execution = store.queries.get(key)
    assert execution is not None
    assert execution.wake_at is not None
    return execution.wake_at


def is_marked(store: Store, count: int) -> bool:
    """Whether so many rows are known to be sent."""
    return marked_as_sent(store) == count
