"""Messages with anything in them: each is run, kept or refused, and the worker that got it goes on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from celery.exceptions import InvalidTaskError
from celery.worker.request import create_request_cls
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from kombu import Message
from kombu.exceptions import ContentDisallowed, DecodeError

from celery_durable import Durable, DurableTask
from celery_durable.message import HEADER, capture, delivery_of, publish_arguments, wakes_of
from celery_durable.records import Claim, Refusal, Scheduled, Status
from celery_durable.worker.book import Book
from celery_durable.worker.consumer import DurableConsumer
from celery_durable.worker.headers import flaw_of_headers
from celery_durable.worker.request import DurableRequest

BODY = json.dumps([[], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])
#: As many as fit into some seconds; a failure is shown as it was found.
FEW = settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ODD_TEXT = st.sampled_from(
    [
        "",
        "x" * 10_000,
        "a\x00b",
        "\udcff",
        "'; DROP TABLE x; --",
        "../../etc",
        "\u202eevil",
        "😀",
        "NaN",
        "-1",
    ]
)
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 2**31, 2**63, 10**30, -(10**30)])
    | st.floats()
    | ODD_TEXT
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MARK = ANYTHING | st.fixed_dictionaries(
    {}, optional={"send_id": ANYTHING, "version": ANYTHING, "wake": ANYTHING, "more": ANYTHING}
)
HEADERS = st.fixed_dictionaries(
    {"task": st.just("proj.task") | ANYTHING, "id": st.just("hostile") | ANYTHING},
    optional={
        HEADER: MARK,
        "eta": ANYTHING | st.sampled_from(["9999-12-31T23:59:59", "0001-01-01T00:00:00+14:00"]),
        "expires": ANYTHING | st.sampled_from(["9999-12-31T23:59:59", "0001-01-01T00:00:00+14:00"]),
        "replaced_task_nesting": ANYTHING,
        "timelimit": ANYTHING,
        "retries": ANYTHING,
        "shadow": ANYTHING,
        "stamps": ANYTHING,
        "stamped_headers": ANYTHING,
        "compression": ANYTHING,
        "group": ANYTHING,
        "root_id": ANYTHING,
        "argsrepr": ANYTHING,
        "ignore_result": ANYTHING,
    },
)
MARKED = {"task": "proj.task", "id": "hostile", HEADER: {"send_id": None}}
PROPERTIES = st.dictionaries(
    st.sampled_from(["priority", "reply_to", "correlation_id", "declare", "retry", "serializer", "headers"]),
    ANYTHING,
)
ROUTE = st.dictionaries(st.sampled_from(["exchange", "routing_key"]), ANYTHING)


def arrived(
    headers: Any, properties: Any = None, route: Any = None, body: Any = BODY, **more: Any
) -> Message:
    more = {"content_type": "application/json", "content_encoding": "utf-8", **more}
    message = Message(body=body, headers={}, properties=properties or {}, channel=Mock(), **more)
    message.headers, message.delivery_info = headers, route or {}
    return message


class Worker:
    """What a worker's main process makes of a message, as far as to the pool."""

    def __init__(self) -> None:
        self.app = Celery("proj", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.durable = Durable(self.app, database_url="sqlite://")
        self.durable.upgrade()
        side: Any = Mock(book=Book())
        self.durable.worker = side

        @self.app.task(base=DurableTask, name="proj.task", shared=False)
        def task() -> None:
            """Nothing."""

        self.pool = Mock()
        self.request_class = create_request_cls(DurableRequest, task, self.pool, "host", Mock(), app=self.app)
        self.consumer: Any = DurableConsumer.__new__(DurableConsumer)
        self.consumer.app, self.consumer.connection_errors = self.app, ()
        self.consumer.event_dispatcher = None
        self.consumer.strategies, self.consumer.on_task_message = {}, ()
        self.consumer.call_soon_ack = Mock()

    def gets(self, message: Message) -> str:
        """As Celery's consumer and strategy do it; only what they foresee may be raised."""
        if type(message.headers["task"]) is not str:
            self.consumer.create_task_handler()(message)
            assert message.acknowledged
            return "nameless"
        if message.headers["task"] != "proj.task":
            self.consumer.on_unknown_task(None, message, KeyError(message.headers["task"]))
            return "unknown"
        try:
            request = self.request_class(message, app=self.app, hostname="host", body=message.body)
        except (InvalidTaskError, ContentDisallowed) as error:
            self.consumer.on_invalid_task(None, message, error)
            return "invalid"
        except DecodeError as error:
            self.consumer.on_decode_error(message, error)
            return "undecodable"
        if request.expires and request.revoked():
            return "revoked"
        request.stamps  # noqa: B018 - Celery reads them of each that it may have to revoke
        request.execute_using_pool(self.pool)
        store = self.durable.store
        answer = store.claims.claim(request.delivery, "worker", 60.0, 3)
        assert isinstance(answer, Claim | Refusal | Scheduled)
        found = store.queries.get(request.id)
        assert found is None or found.message is None or goes_out(found.message)
        return "claimed"


def goes_out(message: Any) -> bool:
    """A row's message can be sent, or is known not to be."""
    outgoing: Any = SimpleNamespace(
        message=message, status=Status.SLEEPING, send_id=None, message_version=0, sends=1
    )
    try:
        return bool(publish_arguments(outgoing))
    except ValueError:
        return True


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.durable.store.dispose()
    worker.app.close()


@FEW
@example(headers={"task": "unknown", "id": None}, properties={}, route={})
@example(headers={"task": "unknown", "id": [None]}, properties={}, route={})
@example(headers={"task": "unknown", "id": ""}, properties={}, route={})
@example(
    headers={**MARKED, "eta": "0001-01-01T00:00:00+14:00", "expires": []},
    properties={},
    route={},
)
@given(headers=HEADERS, properties=PROPERTIES, route=ROUTE)
def test_nothing_in_headers_and_properties_is_the_end_of_a_worker(
    worker: Worker, headers: Any, properties: Any, route: Any
) -> None:
    assert worker.gets(arrived(headers, properties, route))


GOOD = {"id": "good", "task": "proj.task"}


@pytest.mark.parametrize(
    "mark",
    [
        "x",
        [],
        {"version": "x"},
        {"version": 10**30, "wake": -1},
        {"send_id": ["a"], "wake": "first"},
        {"send_id": "a\x00b"},
        {"send_id": {"a": 1}, "version": -1, "wake": {}},
    ],
    ids=str,
)
def test_nonsense_in_our_own_header_counts_as_nothing(worker: Worker, mark: Any) -> None:
    headers = {**GOOD, "id": f"{mark}"[:40].replace("\x00", ""), HEADER: mark}
    delivery = delivery_of(headers, capture(arrived(headers)), eta=None, expires=None)
    assert (delivery.send_id, delivery.version, delivery.nesting, wakes_of(headers)) == (None, 0, 0, 0)
    assert worker.gets(arrived(headers)) == "claimed"


@pytest.mark.parametrize(
    "bad",
    [
        {"timelimit": "x"},
        {"timelimit": [1]},
        {"timelimit": [1, "2"]},
        {"timelimit": [-1, None]},
        {"stamps": 5},
        {"stamped_headers": 5},
        {"stamped_headers": [["a"]]},
        {"expires": "soon"},
        {"eta": {}},
        {"id": ["a"]},
        {"compression": "\x00"},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_marked", [True, False])
def test_what_a_worker_would_stumble_over_is_refused_and_said(
    worker: Worker, bad: dict[str, Any], is_marked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {**GOOD, **bad} | ({HEADER: {"send_id": "s"}} if is_marked else {})
    message = arrived(headers)
    with caplog.at_level(logging.WARNING):
        assert worker.gets(message) == "invalid"
    assert message.acknowledged
    assert any(record.levelno >= logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("missing", ["id"])
def test_a_message_without_an_id_is_refused(worker: Worker, missing: str) -> None:
    headers = {name: value for name, value in GOOD.items() if name != missing}
    assert worker.gets(arrived(headers)) == "invalid"


@pytest.mark.parametrize("body", ["[]", "5", "{", '"text"', "[[], {}]", b"\xff", "null"])
def test_a_body_that_is_none_is_not_the_end_of_a_worker(worker: Worker, body: Any) -> None:
    assert worker.gets(arrived({**GOOD, "id": f"body {body!r}"}, body=body)) in ("invalid", "undecodable")


def test_headers_that_cannot_be_written_down_are_refused(worker: Worker) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for bad in (deep, object(), {1: object()}):
        assert worker.gets(arrived({**GOOD, "mine": bad})) == "invalid"
    for _ in range(100_000):
        (deep,) = deep or ([],)


def test_a_message_does_not_choose_how_it_is_published() -> None:
    message = capture(
        arrived(
            GOOD, {"declare": ["x"], "retry": True, "serializer": "pickle", "priority": 3, "mandatory": 1}
        )
    )
    assert json.loads(message.properties) == {"priority": 3}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a": {"__type__": "decimal", "__value__": "x"}}',
        '{"a": {"__type__": "uuid", "__value__": "x"}}',
        '{"a": {"__type__": "bytes", "__value__": 5}}',
        "[]",
        "",
        '"x"',
    ],
    ids=lambda text: text[:30],
)
@pytest.mark.parametrize("column", ["headers", "properties"])
def test_a_stored_text_that_cannot_be_read_is_a_value_error(text: str, column: str) -> None:
    message = SimpleNamespace(**{"headers": "{}", "properties": "{}", column: text})
    outgoing: Any = SimpleNamespace(message=message, status=Status.SLEEPING)
    with pytest.raises(ValueError, match="headers"):
        publish_arguments(outgoing)


def test_headers_as_celery_makes_them_are_fine() -> None:
    for headers in (
        {},
        {"timelimit": [None, None]},
        {"timelimit": (3, 1.5)},
        {"stamps": {}, "stamped_headers": []},
    ):
        assert flaw_of_headers(headers) is None
