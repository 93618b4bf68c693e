"""What falls due together keeps its lane: the urgent first, then all others in the order of their times."""

from __future__ import annotations

from typing import Any

import pytest

from tests.nodes import Bench, on

TASKS = 5_000
#: So many are left for a worker; the others are looked at as the broker hands them out.
LEFT = 100
#: Which priority comes first is the broker's own.
PRIORITIES = {"redis": {"low": 9, "middle": 6, "high": 0}, "rabbitmq": {"low": 1, "middle": 5, "high": 9}}


@pytest.mark.report("wrong-lane", "backlog")
@on("redis-postgres", "rabbitmq-postgres")
def test_five_thousand_wakes_come_in_order_and_what_is_urgent_does_not_wait_for_them(bench: Bench) -> None:
    bench.configure(task_default_queue_type="classic", task_queue_max_priority=9)
    priorities = PRIORITIES[bench.deployment.broker]
    durable, double = bench.app().durable, bench.project.double  # type: ignore[attr-defined]
    durable.upgrade()
    low = [
        double.apply_async((number,), countdown=600, queue="lane", priority=priorities["low"]).id
        for number in range(TASKS)
    ]
    for lane in ("middle", "high"):
        double.apply_async((lane,), countdown=3600, queue="lane", priority=priorities[lane])
    assert len(durable.postpone(status="scheduled", by=-7200)) == TASKS + 2
    bench.beat()
    bench.wait_for(lambda: bench.broker.messages().ready == TASKS + 2, message="all are sent")

    numbers = [priorities[lane] for lane in ("high", "middle")] + [priorities["low"]] * (TASKS - LEFT)
    assert handed_out(bench, len(numbers)) == [
        (first, priority, "lane")
        for first, priority in zip(["high", "middle", *range(TASKS - LEFT)], numbers, strict=True)
    ]
    urgent = double.apply_async(("now",), queue="lane", priority=priorities["high"])
    bench.worker(queues="lane", concurrency=1)
    assert urgent.get(timeout=20) == "nownow"
    bench.wait_for(lambda: bench.witness.count(step="doubled") == LEFT + 1, message="all others have run")
    runs = [seen.task_id for seen in bench.witness.sightings(step="body")]
    assert runs == [urgent.id, *low[-LEFT:]]


def handed_out(bench: Bench, count: int) -> list[tuple[Any, int, str]]:
    """Argument, priority and routing key of the messages that a consumer would get, in their order."""
    messages = []
    with bench.app().connection_for_read() as connection:
        queue = bench.app().amqp.queues["lane"](connection.default_channel)
        for _ in range(count):
            message = queue.get(no_ack=True)
            assert message is not None
            (argument,), _, _ = message.payload
            messages.append((argument, message.properties["priority"], message.delivery_info["routing_key"]))
    return messages
