"""The body of a chord is a row before it is a message: it needs no broker at that instant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from celery._state import _task_stack
from celery.app.task import Context
from celery.canvas import maybe_signature

from celery_durable import Durable, DurableTask
from celery_durable.records import Status

BODY = {"task": "proj.gather", "args": (), "kwargs": {}, "options": {"task_id": "body"}, "subtask_type": None}
NOWHERE = "amqp://guest:guest@127.0.0.1:1//"


def make_app(database: str, broker: str) -> Celery:
    app = Celery("proj", broker=broker, backend="cache+memory://", set_as_current=False)
    app.conf.update(durable_database_url=database, broker_connection_timeout=1, task_default_queue="bodies")
    Durable(app)

    @app.task(base=DurableTask, name="proj.gather", shared=False)
    def gather(values: Any) -> Any:
        return values

    return app


@contextmanager
def last_member_of(app: Celery) -> Iterator[None]:
    """Within this block the last member of a chord is what runs here."""
    task: Any = app.tasks["proj.gather"]
    app.set_current()
    _task_stack.push(task)
    task.request_stack.push(Context({"id": "member", "group": "group", "chord": BODY}))
    try:
        yield
    finally:
        task.request_stack.pop()
        _task_stack.pop()


def send_body(app: Celery) -> Any:
    with last_member_of(app):
        return maybe_signature(BODY, app=app).delay([1, 2])  # type: ignore[no-untyped-call]


class TestABodyThatTheBrokerDoesNotTake:
    @pytest.fixture
    def app(self, store_url: str) -> Celery:
        app = make_app(store_url, NOWHERE)
        app.durable.upgrade()
        return app

    def test_is_a_row_that_a_scheduler_sends(self, app: Celery) -> None:
        assert send_body(app).id == "body"
        row = app.durable.get("body")
        assert (row.status, row.sends) == (Status.SCHEDULED, 1)
        assert 0 < (row.wake_at - row.created_at).total_seconds() <= 10

    def test_is_one_row_however_often_it_is_sent(self, app: Celery) -> None:
        send_body(app)
        before = app.durable.get("body")
        send_body(app)
        assert app.durable.get("body") == before


class TestABodyWithoutADatabase:
    def test_is_left_to_the_broker(self) -> None:
        app = make_app("postgresql+psycopg://nobody@127.0.0.1:1/nothing", "memory://")
        assert send_body(app).id == "body"
        with app.connection_for_read() as connection:
            queue = app.amqp.queues["bodies"](connection.default_channel)
            assert queue.get(no_ack=True).headers["id"] == "body"
