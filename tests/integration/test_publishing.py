"""Batches at a real broker: what it does not take holds up nobody, and everything is accounted for."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

import pytest

from celery_durable.publisher import Published, Publisher
from celery_durable.records import Message, Outgoing, Status
from tests.nodes import Bench, on

SMALL, LARGE = b"[[], {}, {}]", b"x" * 300_000


@pytest.fixture
def publisher(bench: Bench) -> Iterator[Publisher]:
    publisher = Publisher(bench.app())
    yield publisher
    publisher.close()


def outgoing(key: str, body: bytes = SMALL, *, exchange: str = "", routing_key: str = "celery") -> Outgoing:
    message = Message(
        headers=f'{{"id": "{key}", "task": "proj.task"}}',
        properties=f'{{"correlation_id": "{key}"}}',
        body=body,
        content_type="application/json",
        content_encoding="utf-8",
        compression=None,
        exchange=exchange,
        routing_key=routing_key,
    )
    now = datetime.now(timezone.utc)
    return Outgoing(key, Status.SLEEPING, "proj.task", None, 0, 1, now, message)


def keys(items: list[Outgoing]) -> list[str]:
    return [item.key for item in items]


@on("rabbitmq-postgres", "redis-postgres")
def test_more_than_one_write_can_hold(bench: Bench, publisher: Publisher) -> None:
    batch = [outgoing(f"{number}", LARGE if number % 3 else SMALL) for number in range(60)]
    assert keys(publisher.publish(batch).sent) == keys(batch)
    assert tuple(bench.broker.messages()) == (60, 0)


@on("rabbitmq-postgres")
class TestRabbit:
    def test_one_that_closes_the_channel_holds_up_nobody(self, bench: Bench, publisher: Publisher) -> None:
        names = [f"{number}" for number in range(40)]
        batch = [outgoing(name, exchange="nowhere" if name == "20" else "") for name in names]
        published = publisher.publish(batch)
        assert (keys(published.unsent), published.broken) == (["20"], [])
        assert keys(published.sent) == [name for name in names if name != "20"]
        assert keys(publisher.publish([outgoing("next")]).sent) == ["next"]
        assert not publisher.broker.is_away

    def test_what_finds_no_queue_comes_back_whole_while_more_is_sent(
        self, bench: Bench, publisher: Publisher
    ) -> None:
        """What comes back is as much as goes out, and the broker wants to be read meanwhile."""
        bench.app().conf.task_create_missing_queues = False
        batch = [
            outgoing(f"{number}", LARGE, routing_key="celery" if number % 2 else "lost")
            for number in range(60)
        ]
        published: Published = publisher.publish(batch)
        assert keys(published.sent) == [f"{number}" for number in range(60) if number % 2]
        assert keys(published.unsent) == [f"{number}" for number in range(60) if not number % 2]
        assert not publisher.broker.is_away
