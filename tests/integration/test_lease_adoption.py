"""A message that waits behind a long task is made a row, before its broker loses patience with the worker."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from amqp.exceptions import PreconditionFailed
from kombu import Connection, Queue

from tests.integration.leases_support import PROJECT, time_of, tokens_of, wait_for_step
from tests.integration.support import assert_no_traceback, wait_for_status
from tests.nodes import Bench, on
from tests.nodes.rabbit import RabbitServer

#: Seconds of the patience of a broker with what is not acknowledged, and between two looks (else a minute).
PATIENCE, LOOK = 5.0, 0.5
#: Seconds for which a message waits in this worker before it becomes a row.
ADOPT_AFTER = 1.5


@pytest.fixture
def bench_module() -> str:
    return PROJECT


@pytest.fixture
def impatient(bench: Bench) -> Iterator[RabbitServer]:
    """The broker, which closes the channel of whoever does not acknowledge in time."""
    server = bench.broker_server
    assert isinstance(server, RabbitServer)
    before = set_options(server, consumer_timeout=PATIENCE * 1000, channel_tick_interval=LOOK * 1000)
    yield server
    set_options(server, **before)


def set_options(server: RabbitServer, **options: float) -> dict[str, float]:
    """Set options of the running broker, for channels to come. What they were."""
    before = {name: float(server.run(f"application:get_env(rabbit, {name}, 0)")) for name in options}
    for name, value in options.items():
        server.run(f"application:set_env(rabbit, {name}, {int(value)})")
    return before


@on("rabbitmq-postgres")
def test_neither_a_long_task_nor_the_one_behind_it_is_too_slow_for_the_broker(
    bench: Bench, impatient: RabbitServer
) -> None:
    bench.configure(task_default_queue_type="quorum", worker_prefetch_multiplier=1)
    worker = bench.worker(concurrency=1, env={"LEASES_ADOPT_AFTER": str(ADOPT_AFTER)})
    bench.beat(wait=False)
    long = bench.project.work.delay("tick", PATIENCE + 4)
    wait_for_step(bench, long, "body")
    behind = bench.project.work.delay("tick", 0.2)
    held = Unacknowledged(bench)
    bench.wait_for(lambda: worker.logs().count("received") == 2, message="the worker holds both")
    bench.wait_for(bench.queue_is_empty, PATIENCE, "what waits is acknowledged too")
    assert bench.witness.count(behind.id, "body") == 0
    assert wait_for_status(bench, behind.id, "scheduled").token == 0
    held.assert_channel_is_closed()
    assert [result.get(timeout=30) for result in (long, behind)] == [["tick", 1]] * 2
    assert time_of(bench, long, "done") < time_of(bench, behind, "body")
    for result in (long, behind):
        assert tokens_of(bench, result) == tokens_of(bench, result, "done") == [1]
        wait_for_status(bench, result.id, "succeeded")
    bench.wait_for(bench.queue_is_empty)
    for complaint in ("PRECONDITION_FAILED", "onnection to broker lost", "dropped: "):
        assert complaint not in worker.logs()
    assert_no_traceback(bench)


@on("redis-postgres")
def test_what_was_adopted_by_a_worker_that_stops_goes_to_another_one_at_once(bench: Bench) -> None:
    bench.configure(worker_prefetch_multiplier=1)
    worker = bench.worker(concurrency=1, env={"LEASES_ADOPT_AFTER": str(ADOPT_AFTER)})
    bench.beat(wait=False)
    long = bench.project.work.delay("tick", 10.0)
    wait_for_step(bench, long, "body")
    behind = bench.project.work.delay("tick", 0.2)
    # Not the first resend, which is due in two minutes.
    assert wait_for_status(bench, behind.id, "scheduled").token == 0
    bench.wait_for(bench.queue_is_empty, message="what waits is acknowledged too")
    worker.signal(signal.SIGTERM)
    bench.wait_for(lambda: "Warm shutdown" in worker.logs(), message="the first worker stops")
    bench.worker(concurrency=1)
    assert behind.get(timeout=30) == ["tick", 1]
    assert tokens_of(bench, behind) == tokens_of(bench, behind, "done") == [1]
    assert long.get(timeout=30) == ["tick", 1]
    assert time_of(bench, behind, "done") < time_of(bench, long, "done")
    assert_no_traceback(bench)


class Unacknowledged:
    """A message that nobody acknowledges: it shows that the broker does as it says."""

    def __init__(self, bench: Bench) -> None:
        assert bench.broker.url is not None
        self._connection = Connection(bench.broker.url)
        # Not counted as a message of tasks.
        queue = Queue("held.celery.pidbox", channel=self._connection.channel(), auto_delete=True)
        queue.declare()
        self._connection.Producer().publish("held", routing_key=queue.name)
        self._messages: list[Any] = []
        self._consumer = self._connection.Consumer([queue], on_message=self._messages.append)
        self._consumer.consume()
        while not self._messages:
            self._connection.drain_events(timeout=10)

    def assert_channel_is_closed(self) -> None:
        with pytest.raises(PreconditionFailed, match="timed out"):
            self._connection.drain_events(timeout=PATIENCE + 4 * LOOK)
        self._connection.close()
