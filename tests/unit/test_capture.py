"""What Celery would have published, caught as messages that can become rows."""

from __future__ import annotations

import json
import threading
from datetime import datetime, timezone

import pytest
from celery import Celery, chain, chord, group, signals
from celery.events.dispatcher import EventDispatcher
from kombu import Queue

from celery_durable.capture import capturing, due_at, is_capturing
from celery_durable.message import HEADER, capture, mark_of, mark_send, publish_arguments
from celery_durable.records import Due, Outgoing, Status
from celery_durable.task import DurableTask

# The last one is the broker's own limit, which a row must not bring back.
PER_SEND = {"delivery_tag", "delivery_info", "expiration"}


@pytest.fixture
def app(request):
    app = Celery("proj", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.amqp_cls = "celery_durable.capture:DurableAMQP"
    app.conf.task_default_queue = request.node.name  # the memory broker is one for the whole process
    app.conf.task_send_sent_event = True

    @app.task(name="proj.add", shared=False)
    def add(x, y=0):
        return x + y

    return app


@pytest.fixture
def add(app):
    return app.tasks["proj.add"]


@pytest.fixture
def inbox(app):
    """Empties the app's queue: the messages that have really been published."""
    with app.connection_for_read() as connection:

        def empty(name=None):
            queue = app.amqp.queues[name or app.conf.task_default_queue](connection.default_channel)
            queue.declare()
            return list(iter(lambda: queue.get(no_ack=True), None))

        yield empty


def names_of(caught):
    return [item.task_name for item in caught]


def body_of(item):
    return json.loads(item.message.body)


def publish(app, item):
    """Send a caught message as the publisher of rows does."""
    taken_until = datetime(2030, 1, 1, tzinfo=timezone.utc)
    row = Outgoing("key", Status.OUTBOX, item.task_name, None, 0, 1, taken_until, item.message)
    with app.producer_pool.acquire() as producer:
        producer.publish(**publish_arguments(row))


# -- what is caught --------------------------------------------------------------------------------


def test_nothing_reaches_the_broker_while_capturing_and_everything_does_before_and_after(add, inbox):
    add.delay(1)
    with capturing() as caught:
        add.delay(2)
        add.delay(3)
    add.delay(4)

    assert [message.payload[0] for message in inbox()] == [[1], [4]]
    assert [body_of(item)[0] for item in caught] == [[2], [3]]


def test_the_block_knows_that_it_is_one(add):
    assert not is_capturing()
    with capturing():
        assert is_capturing()
    assert not is_capturing()


def test_another_thread_publishes_as_ever(add, inbox):
    with capturing() as caught:
        other = threading.Thread(target=add.delay, args=[1])
        other.start()
        other.join()

    assert caught == []
    assert len(inbox()) == 1


def test_a_block_inside_a_block_has_its_own_catch(add):
    with capturing() as outer:
        with capturing() as inner:
            add.delay(1)
        add.delay(2)

    assert [body_of(item)[0] for item in inner] == [[1]]
    assert [body_of(item)[0] for item in outer] == [[2]]


@pytest.mark.parametrize("signal", [signals.before_task_publish, signals.after_task_publish])
def test_what_a_receiver_of_a_signal_sends_is_not_caught(app, add, inbox, signal):
    def audit(sender, **_):
        if sender == "proj.add":
            app.send_task("proj.audit", (sender,))

    signal.connect(audit)
    try:
        with capturing() as caught:
            add.apply_async((1,), task_id="id")
    finally:
        signal.disconnect(audit)

    assert names_of(caught) == ["proj.add"]
    assert [message.headers["task"] for message in inbox()] == ["proj.audit"]


def test_an_error_in_the_block_ends_the_capturing(add, inbox):
    with pytest.raises(ZeroDivisionError), capturing():
        raise ZeroDivisionError

    add.delay(1)
    assert len(inbox()) == 1


def test_no_broker_is_needed():
    app = Celery("proj", broker="amqp://guest@127.0.0.1:1//", set_as_current=False)
    app.amqp_cls = "celery_durable.capture:DurableAMQP"

    with capturing() as caught:
        app.send_task("proj.elsewhere", (1,))

    assert names_of(caught) == ["proj.elsewhere"]


def test_each_send_of_a_durable_task_by_its_name_is_marked_as_one_of_its_own(app):
    @app.task(base=DurableTask, name="proj.durable", shared=False)
    def durable():
        return None

    with capturing() as caught:
        app.send_task("proj.durable", headers={"tenant": "a"})
        app.send_task("proj.durable", headers=mark_send({"tenant": "a"}, "given"))
        app.send_task("proj.add")

    first, second, plain = (mark_of(item.headers).get("send_id") for item in caught)
    assert first
    assert (second, plain) == ("given", None)
    assert [item.headers.get("tenant") for item in caught] == ["a", "a", None]


# -- as it would have been sent --------------------------------------------------------------------


WHEN = datetime(2030, 1, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"serializer": "pickle", "compression": "zlib"},
        {"priority": 3, "expires": WHEN, "headers": {"tenant": "a"}},
        {"eta": WHEN, "time_limit": 9, "soft_time_limit": 8, "shadow": "s", "argsrepr": "…"},
        {"reply_to": "replies", "correlation_id": "mine", "delivery_mode": 1, "ignore_result": True},
        {"retries": 2, "stamped_headers": ["tenant"], "tenant": "a"},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_a_caught_message_is_the_one_that_would_have_been_sent(app, add, inbox, options):
    add.apply_async((1,), {"y": 2}, task_id="id", **options)
    with capturing() as caught:
        add.apply_async((1,), {"y": 2}, task_id="id", **options)
    publish(app, caught[0])

    direct, later = inbox()

    assert later.headers == direct.headers
    assert later.body == direct.body
    assert (later.content_type, later.content_encoding) == (direct.content_type, direct.content_encoding)
    assert later.delivery_info == direct.delivery_info
    assert lasting_properties(later) == lasting_properties(direct)


def lasting_properties(message):
    return {name: value for name, value in message.properties.items() if name not in PER_SEND}


def test_a_caught_message_is_what_a_worker_would_have_captured(add, inbox):
    add.apply_async((1,), task_id="id", priority=4, compression="gzip")
    with capturing() as caught:
        add.apply_async((1,), task_id="id", priority=4, compression="gzip")

    received = capture(inbox()[0])

    assert json.loads(caught[0].message.headers) == json.loads(received.headers)
    assert caught[0].message.body == received.body
    assert (caught[0].message.exchange, caught[0].message.routing_key) == (
        received.exchange,
        received.routing_key,
    )


def test_routes_and_exchanges_are_those_that_celery_chose(app, add):
    app.conf.task_queues = [Queue("rare", routing_key="rare.#", exchange="topics")]
    app.conf.task_routes = {"proj.add": {"queue": "rare", "routing_key": "rare.add"}}
    app.amqp.queues["rare"].exchange.type = "topic"

    with capturing() as caught:
        add.delay(1)

    assert (caught[0].message.exchange, caught[0].message.routing_key) == ("topics", "rare.add")


def test_our_mark_is_handed_on_but_not_stored(add):
    with capturing() as caught:
        add.apply_async((1,), headers=mark_send({"tenant": "a"}, "send"))

    assert caught[0].headers[HEADER] == {"send_id": "send"}
    stored = json.loads(caught[0].message.headers)
    assert HEADER not in stored
    assert stored["tenant"] == "a"


def test_the_signals_of_a_publish_are_sent(add):
    @signals.before_task_publish.connect(weak=False, sender="proj.add")
    def before(headers=None, **_):
        headers["traceparent"] = "00-1-2"

    try:
        with capturing() as caught:
            add.delay(1)
    finally:
        signals.before_task_publish.disconnect(before, sender="proj.add")

    assert json.loads(caught[0].message.headers)["traceparent"] == "00-1-2"


def test_no_event_tells_of_a_message_that_did_not_go_to_the_broker(add, monkeypatch):
    events = []
    monkeypatch.setattr(EventDispatcher, "publish", lambda _, kind, *args, **kwargs: events.append(kind))

    with capturing():
        add.delay(1)
    assert events == []

    add.delay(1)
    assert events == ["task-sent"]


# -- canvases --------------------------------------------------------------------------------------


def test_of_a_chain_the_first_is_caught_and_carries_the_rest(add):
    with capturing() as caught:
        chain(add.s(1), add.s(2), add.s(3)).apply_async()

    assert len(caught) == 1
    _, _, embed = body_of(caught[0])
    assert [task["args"] for task in embed["chain"]] == [[3], [2]]


def test_of_a_group_each_member_is_caught(add):
    with capturing() as caught:
        result = group(add.s(n) for n in range(3)).apply_async()

    assert [body_of(item)[0] for item in caught] == [[0], [1], [2]]
    assert [item.headers["id"] for item in caught] == [child.id for child in result]
    assert {item.headers["group"] for item in caught} == {result.id}


def test_of_a_chord_the_header_is_caught_with_the_body_in_each_of_its_members(add):
    with capturing() as caught:
        chord([add.s(1), add.s(2)], add.s(7)).apply_async()

    assert names_of(caught) == ["proj.add", "proj.add"]
    assert [body_of(item)[2]["chord"]["args"] for item in caught] == [[7], [7]]


def test_of_a_chord_in_a_store_that_cannot_count_the_task_that_waits_is_caught_too(app, add, tmp_path):
    app.conf.result_backend = f"file://{tmp_path}"

    with capturing() as caught:
        chord([add.s(1), add.s(2)], add.s()).apply_async()

    assert sorted(names_of(caught)) == ["celery.chord_unlock", "proj.add", "proj.add"]


def test_callbacks_travel_in_the_message_of_the_task_that_they_follow(add):
    with capturing() as caught:
        add.apply_async((1,), link=add.s(2), link_error=add.s(3))

    _, _, embed = body_of(caught[0])
    assert [task["args"] for task in embed["callbacks"]] == [[2]]
    assert [task["args"] for task in embed["errbacks"]] == [[3]]


def test_an_empty_group_is_no_message(add):
    with capturing() as caught:
        group([]).apply_async()

    assert caught == []


# -- due times -------------------------------------------------------------------------------------


def test_what_is_caught_is_due_at_once_unless_it_is_said_otherwise(add):
    with capturing() as caught:
        add.delay(1)
        with due_at(Due(seconds=60)):
            add.delay(2)
            add.delay(3)
        add.delay(4)

    assert [item.due for item in caught] == [None, Due(seconds=60), Due(seconds=60), None]
