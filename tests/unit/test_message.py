"""The wire message: kept as it came, sent again as it was."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery
from kombu import Connection, Exchange, Message, Producer, Queue

from celery_durable.message import (
    HEADER,
    as_bytes,
    capture,
    delivery_from_headers,
    delivery_of,
    instant_of_header,
    mark_of,
    mark_send,
    publish_arguments,
)
from celery_durable.records import Outgoing, Status

ADDED_PER_SEND = {"delivery_tag", "delivery_info", "expiration"}


@pytest.fixture
def channel():
    with Connection("memory://") as connection, connection.channel() as channel:
        yield channel


@pytest.fixture
def post(channel):
    """Publishes, and returns the message as a consumer gets it."""
    queue = Queue("post", Exchange("post", "topic"), routing_key="#")(channel)
    queue.declare()

    def publish(body, **options):
        Producer(channel).publish(body, exchange="post", **options)
        return queue.get()

    yield publish
    queue.purge()


def outgoing(message, *, status=Status.SLEEPING, send_id="send", version=0, sends=1):
    return Outgoing(
        key="id",
        status=status,
        task_name="proj.task",
        send_id=send_id,
        message_version=version,
        sends=sends,
        taken_until=datetime(2030, 1, 1, tzinfo=timezone.utc),
        message=message,
    )


def again(post, message, **options):
    """The message after one sleep: captured, and sent from its row."""
    arguments = publish_arguments(outgoing(capture(message), **options))
    del arguments["exchange"]
    return post(arguments.pop("body"), **arguments)


def properties_of(message):
    return {name: value for name, value in message.properties.items() if name not in ADDED_PER_SEND}


def headers_of(message):
    return {name: value for name, value in message.headers.items() if name != HEADER}


TASK = {"id": "id", "task": "proj.task"}


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "gzip", "zlib"])
@pytest.mark.parametrize("serializer", ["json", "pickle", "msgpack", "yaml"])
def test_a_message_that_is_sent_again_equals_the_one_that_came(post, serializer, compression):
    first = post(
        [[1, "ü"], {"a": None}, {"chord": None}],
        routing_key="a.b",
        serializer=serializer,
        compression=compression,
        headers={**TASK, "stamps": {"tenant": [1, 2]}, "when": datetime(2030, 1, 1), "mine": "yes"},
        priority=7,
        delivery_mode=1,
        correlation_id="id",
        reply_to="reply",
        message_id="m",
        app_id="someone",
    )

    second = again(post, first)

    assert second.body == first.body
    assert headers_of(second) == headers_of(first)
    assert properties_of(second) == properties_of(first)
    assert (second.content_type, second.content_encoding) == (first.content_type, first.content_encoding)
    assert second.delivery_info == first.delivery_info


def test_a_thousand_sleeps_later_the_message_has_not_grown(post):
    message = first = post([[], {}, {}], routing_key="k", headers=mark_send(TASK, "send"), compression="gzip")

    for sends in range(1, 1_001):
        message = again(post, message, sends=sends)

    assert message.body == first.body
    assert headers_of(message) == headers_of(first)
    assert properties_of(message) == properties_of(first)
    assert mark_of(message.headers) == {"send_id": "send", "version": 0, "wake": 1_000}


def test_a_body_that_is_no_text_is_kept_to_the_byte(post):
    first = post(b"\x00\xff\x80", routing_key="k", content_type="application/data", content_encoding="binary")

    assert again(post, first).body == b"\x00\xff\x80"


def test_the_broker_s_own_time_limit_is_dropped_for_it_would_drop_a_wake(post):
    first = post([], routing_key="k", headers=TASK, expiration=30)
    assert first.properties["expiration"]

    assert "expiration" not in again(post, first).properties


def test_a_priority_of_none_stays_none():
    message = received(properties={"correlation_id": "id"})

    assert "priority" not in publish_arguments(outgoing(capture(message)))


# -- what the way leaves on a message --------------------------------------------------------------


def received(*, headers=None, properties=None, delivery_info=None, body=b"[]"):
    return Message(
        body=body,
        headers={**TASK, **(headers or {})},
        properties=properties or {},
        delivery_info=delivery_info or {"exchange": "", "routing_key": "celery"},
        content_type="application/json",
        content_encoding="utf-8",
    )


@pytest.mark.parametrize(
    "name",
    [
        "x-death",
        "x-first-death-reason",
        "x-first-death-queue",
        "x-last-death-exchange",
        "x-delivery-count",
        "x-opt-enqueue-time",
        HEADER,
        "compression",
    ],
)
def test_what_a_broker_or_we_wrote_on_the_headers_is_not_kept(name):
    stored = capture(Message(body=b"[]", headers={**TASK, name: None}))

    assert json.loads(stored.headers) == TASK


@pytest.mark.parametrize("name", ["x-tenant", "x", "traceparent", "durability", "timelimit"])
def test_every_other_header_is_kept(name):
    assert json.loads(capture(received(headers={name: [1]})).headers)[name] == [1]


@pytest.mark.parametrize("name", sorted(ADDED_PER_SEND | {"body_encoding", "content_type"}))
def test_what_is_added_anew_at_each_send_is_not_kept(name):
    stored = capture(received(properties={name: "x", "reply_to": "r"}))

    assert json.loads(stored.properties) == {"reply_to": "r"}


@pytest.mark.parametrize(
    ("arrived_by", "kept"),
    [
        ("0." * 27 + "1.celery", "celery"),
        ("1." * 28 + "a.b.c", "a.b.c"),
        ("0." * 27 + "celery", "0." * 27 + "celery"),  # 27 digits: somebody's own key
        ("1.0.celery", "1.0.celery"),
        ("celery", "celery"),
        (None, ""),
    ],
)
def test_the_digits_of_rabbitmq_s_delayed_delivery_are_taken_off_the_routing_key(arrived_by, kept):
    assert capture(received(delivery_info={"exchange": "x", "routing_key": arrived_by})).routing_key == kept


def test_a_message_without_delivery_info_goes_to_the_default_exchange():
    stored = capture(Message(body=b"[]", headers=TASK))

    assert (stored.exchange, stored.routing_key) == ("", "")


@pytest.mark.parametrize(
    ("body", "encoding", "expected"),
    [
        ("ü", "utf-8", b"\xc3\xbc"),
        ("ü", "latin-1", b"\xfc"),
        ("ü", None, b"\xc3\xbc"),
        ("ü", "binary", b"\xc3\xbc"),
        (b"\xff", "utf-8", b"\xff"),
        (memoryview(b"\xff"), "binary", b"\xff"),
        (bytearray(b"a"), None, b"a"),
    ],
)
def test_a_body_is_stored_as_bytes(body, encoding, expected):
    assert as_bytes(body, encoding) == expected


# -- our mark --------------------------------------------------------------------------------------


def test_a_send_is_marked_beside_the_headers_that_there_are():
    headers = {"a": 1}

    assert mark_send(headers, "s") == {"a": 1, HEADER: {"send_id": "s"}}
    assert mark_send(None, "s") == {HEADER: {"send_id": "s"}}
    assert headers == {"a": 1}


@pytest.mark.parametrize("nonsense", [None, "text", 3, [1], True])
def test_a_mark_that_is_not_ours_is_none(nonsense):
    assert mark_of({HEADER: nonsense}) == mark_of({}) == {}


def test_a_wake_says_which_send_which_version_and_which_wake_it_is(post):
    message = again(post, post([], routing_key="k", headers=TASK), send_id="s", version=2, sends=5)

    assert mark_of(message.headers) == {"send_id": "s", "version": 2, "wake": 5}


def test_the_message_of_a_plain_task_gets_no_mark(post):
    first = post([], routing_key="k", headers=TASK)

    second = again(post, first, status=Status.OUTBOX)

    assert second.headers == first.headers


@pytest.mark.parametrize(("name", "text"), [("headers", "[]"), ("properties", "3"), ("headers", "{")])
def test_a_row_whose_message_cannot_be_read_is_a_value_error(name, text):
    stored = capture(received())
    broken = type(stored)(**{**{slot: getattr(stored, slot) for slot in stored.__slots__}, name: text})

    with pytest.raises(ValueError, match=r"."):
        publish_arguments(outgoing(broken))


# -- what a claim is told --------------------------------------------------------------------------


def test_a_delivery_says_what_the_claim_has_to_know():
    headers = {**TASK, "replaced_task_nesting": 2, HEADER: {"send_id": "s", "version": 3, "wake": 4}}
    stored = capture(received(headers=headers))

    delivery = delivery_of(headers, stored, eta=None, expires=None)

    assert (delivery.task_id, delivery.task_name) == ("id", "proj.task")
    assert (delivery.send_id, delivery.version, delivery.nesting, delivery.is_wake) == ("s", 3, 2, True)
    assert delivery.message == stored


def test_a_successor_says_which_run_has_sent_it():
    headers = mark_send({**TASK, "replaced_task_nesting": 1}, "s", predecessor=7)

    delivery = delivery_of(headers, capture(received(headers=headers)), eta=None, expires=None)

    assert (delivery.send_id, delivery.nesting, delivery.predecessor) == ("s", 1, 7)


@pytest.mark.parametrize(
    "mark",
    [
        {},
        {HEADER: None},
        {HEADER: "x"},
        {HEADER: {"send_id": None}},
        {HEADER: {"predecessor": "x"}},
        {HEADER: {"predecessor": 0}},
    ],
)
def test_a_message_of_a_producer_without_this_extension_has_no_send_id(mark):
    headers = {**TASK, **mark, "replaced_task_nesting": None}

    delivery = delivery_of(headers, capture(received()), eta=None, expires=None)

    assert (delivery.send_id, delivery.version, delivery.nesting, delivery.is_wake) == (None, 0, 0, False)
    assert delivery.predecessor is None


@pytest.mark.parametrize(
    ("value", "hour"),
    [
        ("2030-01-01T12:00:00+00:00", 12),
        ("2030-01-01T12:00:00Z", 12),
        ("2030-01-01T12:00:00+02:00", 10),
        ("2030-01-01T12:00:00", 12),  # naive: UTC, whatever the app's timezone
        (datetime(2030, 1, 1, 12, tzinfo=timezone.utc), 12),
    ],
)
def test_the_time_in_a_header_is_read_as_celery_s_worker_reads_it(value, hour):
    app = Celery("proj", set_as_current=False)
    app.conf.timezone = "America/New_York"

    assert instant_of_header(app, value) == datetime(2030, 1, 1, hour, tzinfo=timezone.utc)


@pytest.mark.parametrize("nothing", [None, "", 0])
def test_no_time_in_a_header_is_none(nothing):
    assert instant_of_header(Celery("proj", set_as_current=False), nothing) is None


def test_a_message_that_was_built_here_has_its_time_in_the_row_and_its_expiry_in_the_header():
    app = Celery("proj", set_as_current=False)
    expires = datetime.now(timezone.utc) + timedelta(hours=1)
    headers = {**TASK, "eta": "2030-01-01T12:00:00Z", "expires": expires.isoformat()}

    delivery = delivery_from_headers(app, headers, capture(received()))

    assert (delivery.eta, delivery.expires) == (None, expires)
