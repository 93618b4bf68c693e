"""The ways to hand a batch to a broker: what counts as accepted, and what one bad message does to others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import pytest
from amqp.exceptions import ChannelError, PreconditionFailed

from celery_durable.cork import Cork
from celery_durable.records import Message, Outgoing, Status
from celery_durable.ways import Attempt, Confirmed, Item, OneByOne, Pipelined
from tests.unit.fakes import StillClock


def item(name: str) -> Item:
    message = Message("{}", "{}", b"", "application/json", "utf-8", None, "", "celery")
    taken_until = datetime(2026, 1, 1, tzinfo=timezone.utc)
    outgoing = Outgoing(name, Status.SLEEPING, "proj.task", None, 0, 1, taken_until, message)
    return Item(outgoing, {"body": name, "correlation_id": name})


def attempt(
    *names: str, clock: StillClock | None = None, is_stopping: Callable[[], bool] | None = None
) -> Attempt:
    return Attempt([item(name) for name in names], clock or StillClock(), 5.0, is_stopping or (lambda: False))


def names(items: Any) -> list[str]:
    return sorted(one.outgoing.key for one in items)


class Producer:
    """A producer of a transport without confirms: `fails` maps a body to what its publish raises."""

    def __init__(self, **fails: Exception) -> None:
        self.fails = fails
        self.published: list[str] = []
        self.flushed: list[str] = []
        self.flush_error: Exception | None = None
        self.after_publish: Callable[[], None] = lambda: None

    def publish(self, *, body: str, **_: Any) -> None:
        if body in self.fails:
            raise self.fails[body]
        self.published.append(body)
        self.after_publish()

    @contextmanager
    def batch(self, max_size: int) -> Any:
        yield
        if self.flush_error is not None:
            raise self.flush_error
        self.flushed += self.published


class TestOneByOne:
    def test_what_was_published_is_sent(self) -> None:
        tried = attempt("a", "b")
        OneByOne(Producer()).send(tried)
        assert names(tried.sent) == ["a", "b"]

    def test_a_message_that_cannot_be_put_into_bytes_holds_up_nobody(self) -> None:
        tried = attempt("a", "b", "c")
        OneByOne(Producer(b=TypeError("object() is no JSON"))).send(tried)
        assert names(tried.sent) == ["a", "c"]
        assert names(tried.broken) == ["b"]

    def test_a_broker_that_goes_away_leaves_what_it_took_before(self) -> None:
        tried = attempt("a", "b", "c")
        with pytest.raises(ConnectionResetError):
            OneByOne(Producer(b=ConnectionResetError())).send(tried)
        assert names(tried.sent) == ["a"]

    def test_when_the_time_is_over_nothing_more_is_begun(self) -> None:
        clock, producer = StillClock(), Producer()
        producer.after_publish = lambda: clock.pause(3)
        tried = attempt("a", "b", "c", "d", clock=clock)
        OneByOne(producer).send(tried)
        assert names(tried.sent) == ["a", "b"]

    def test_when_the_process_is_to_end_nothing_more_is_begun(self) -> None:
        producer = Producer()
        tried = attempt("a", "b", "c", is_stopping=lambda: len(producer.published) >= 1)
        OneByOne(producer).send(tried)
        assert names(tried.sent) == ["a"]


class TestPipelined:
    def test_what_was_flushed_is_sent(self) -> None:
        producer, tried = Producer(), attempt("a", "b")
        Pipelined(producer).send(tried)
        assert producer.flushed == ["a", "b"]
        assert names(tried.sent) == ["a", "b"]

    def test_a_flush_that_fails_has_sent_nothing_for_sure(self) -> None:
        producer, tried = Producer(), attempt("a", "b")
        producer.flush_error = ConnectionResetError()
        with pytest.raises(ConnectionResetError):
            Pipelined(producer).send(tried)
        assert not tried.sent

    def test_a_broken_message_holds_up_nobody(self) -> None:
        producer, tried = Producer(b=ValueError("nonsense")), attempt("a", "b", "c")
        Pipelined(producer).send(tried)
        assert producer.flushed == ["a", "c"]
        assert (names(tried.sent), names(tried.broken)) == (["a", "c"], ["b"])


class Rabbit:
    """A connection to a RabbitMQ that answers as told.

    ``answers`` are played one for each `drain_events`; a body in ``poison`` closes its channel.
    """

    channel_errors = (ChannelError,)

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.answers: list[Callable[[Channel], None]] = []
        self.poison: set[str] = set()

    def channel(self) -> Channel:
        channel = Channel(self)
        self.channels.append(channel)
        return channel

    def drain_events(self, timeout: float) -> None:
        channel = self.channels[-1]
        if channel.is_poisoned:
            raise PreconditionFailed("message too large")
        if self.answers:
            self.answers.pop(0)(channel)
        elif channel.unanswered:
            channel.say("basic_ack", channel.unanswered[-1], True)
        else:
            raise TimeoutError


class Channel:
    def __init__(self, rabbit: Rabbit) -> None:
        self.rabbit = rabbit
        self.events: Any = defaultdict(set)
        self.published: list[str] = []
        self.answered = 0
        self.confirms = False
        self.is_poisoned = False

    @property
    def unanswered(self) -> list[int]:
        return list(range(self.answered + 1, len(self.published) + 1))

    def confirm_select(self) -> None:
        self.confirms = True

    def say(self, event: str, tag: int, multiple: bool = False) -> None:
        self.answered = max(self.answered, tag)
        for handler in self.events[event]:
            handler(tag, multiple)

    def give_back(self, name: str) -> None:
        class Returned:
            properties = {"correlation_id": name}  # noqa: RUF012

        for handler in self.events["basic_return"]:
            handler(ChannelError("NO_ROUTE"), "", "celery", Returned)


class RabbitProducer:
    def __init__(self, channel: Channel, auto_declare: bool) -> None:
        assert not auto_declare
        self.channel = channel

    def publish(self, *, body: str, mandatory: bool, **_: Any) -> None:
        assert self.channel.confirms
        assert mandatory
        if body == "broken":
            raise TypeError("no such header")
        self.channel.published.append(body)
        self.channel.is_poisoned |= body in self.channel.rabbit.poison


class FakeCork(Cork):
    """Lets everything through."""

    def open_channel(self, connection: Any) -> Any:
        return connection.channel()


class TestConfirmed:
    def test_all_are_in_flight_before_the_first_confirm_is_awaited(self) -> None:
        rabbit, tried = Rabbit(), attempt("a", "b", "c")
        seen = []

        def ack_one(channel: Channel) -> None:
            seen.append(list(channel.published))
            channel.say("basic_ack", 1)

        rabbit.answers = [ack_one]
        Confirmed(rabbit, RabbitProducer, FakeCork()).send(tried)  # type: ignore[arg-type]
        assert seen == [["a", "b", "c"]]
        assert names(tried.sent) == ["a", "b", "c"]

    def test_tags_count_on_over_batches(self) -> None:
        way = Confirmed(Rabbit(), RabbitProducer, FakeCork())  # type: ignore[arg-type]
        for name in ("a", "b", "c"):
            tried = attempt(name)
            way.send(tried)
            assert names(tried.sent) == [name]

    def test_a_message_that_the_broker_would_not_keep_is_not_sent(self) -> None:
        rabbit, tried = Rabbit(), attempt("a", "b", "c")
        rabbit.answers = [lambda channel: channel.say("basic_nack", 2)]
        Confirmed(rabbit, RabbitProducer, FakeCork()).send(tried)  # type: ignore[arg-type]
        assert names(tried.sent) == ["a", "c"]

    def test_a_message_without_a_queue_is_returned_and_not_sent(self) -> None:
        rabbit, tried = Rabbit(), attempt("a", "b", "c")
        rabbit.answers = [lambda channel: channel.give_back("b")]
        Confirmed(rabbit, RabbitProducer, FakeCork()).send(tried)  # type: ignore[arg-type]
        assert names(tried.sent) == ["a", "c"]
        assert names(tried.returned) == ["b"]

    def test_what_is_not_confirmed_in_time_is_an_error(self) -> None:
        rabbit, clock = Rabbit(), StillClock()
        tried = attempt("a", "b", clock=clock)
        rabbit.answers = [lambda channel: channel.say("basic_ack", 1), lambda _: clock.pause(5)]
        with pytest.raises(TimeoutError, match="1 messages were not confirmed in time"):
            Confirmed(rabbit, RabbitProducer, FakeCork()).send(tried)  # type: ignore[arg-type]
        assert names(tried.sent) == ["a"]

    def test_a_broken_message_counts_for_no_tag(self) -> None:
        tried = attempt("a", "broken", "c")
        Confirmed(Rabbit(), RabbitProducer, FakeCork()).send(tried)  # type: ignore[arg-type]
        assert (names(tried.sent), names(tried.broken)) == (["a", "c"], ["broken"])

    def test_one_that_closes_the_channel_is_found_out_and_the_others_are_sent(self) -> None:
        rabbit, tried = Rabbit(), attempt("a", "b", "poison", "d")
        rabbit.poison = {"poison"}
        Confirmed(rabbit, RabbitProducer, FakeCork()).send(tried)  # type: ignore[arg-type]
        assert names(tried.sent) == ["a", "b", "d"]
        assert names(tried.refused) == ["poison"]

    def test_after_that_it_is_as_before(self) -> None:
        rabbit = Rabbit()
        rabbit.poison = {"poison"}
        way = Confirmed(rabbit, RabbitProducer, FakeCork())  # type: ignore[arg-type]
        way.send(attempt("poison"))
        tried = attempt("a", "b")
        way.send(tried)
        assert names(tried.sent) == ["a", "b"]
