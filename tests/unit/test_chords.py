"""The sends of a chord's body: whoever sends it, and however often, they are one send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, group
from celery._state import _task_stack
from celery.app.task import Context
from celery.canvas import maybe_signature

from celery_durable import Durable, DurableTask
from celery_durable.capture import capturing
from celery_durable.chords import CHORD_UNLOCK
from celery_durable.message import mark_of


@pytest.fixture
def app() -> Celery:
    app = Celery("proj", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.durable_database_url = "sqlite://"
    Durable(app)

    @app.task(base=DurableTask, name="proj.gather", shared=False)
    def gather(values: Any) -> Any:
        return values

    return app


@pytest.fixture
def gather(app: Celery) -> Any:
    return app.tasks["proj.gather"]


def as_sent(signature: Any) -> Any:
    """A signature as a message carries it."""
    signature.freeze("body")
    return dict(signature)


def send_ids(app: Celery, task: Any, request: dict[str, Any], body: Any) -> list[str | None]:
    """The send ids of what is sent when a run of ``task`` sends a chord's body."""
    app.set_current()
    with running(task, request), capturing() as caught:
        maybe_signature(body, app=app).delay([1, 2])
    return [mark_of(item.headers).get("send_id") for item in caught]


@contextmanager
def running(task: Any, request: dict[str, Any]) -> Iterator[None]:
    """Within this block a run of ``task`` is what Celery takes to be running here."""
    _task_stack.push(task)
    task.request_stack.push(Context(request))
    try:
        yield
    finally:
        task.request_stack.pop()
        _task_stack.pop()


class TestTheBodyOfAChord:
    @pytest.mark.parametrize("shape", ["task", "chain", "group"])
    def test_is_one_send_however_often_its_members_send_it(
        self, app: Celery, gather: Any, shape: str
    ) -> None:
        body = as_sent(
            {"task": gather.s(), "chain": gather.s() | gather.s(), "group": group(gather.s(), gather.s())}[
                shape
            ]
        )
        first = send_ids(app, gather, {"id": "member 1", "group": "g", "chord": body}, body)
        again = send_ids(app, gather, {"id": "member 2", "group": "g", "chord": body}, body)
        assert first == again
        assert None not in first
        assert first

    def test_is_the_same_send_when_the_question_whether_all_are_there_sends_it(
        self, app: Celery, gather: Any
    ) -> None:
        body = as_sent(gather.s())
        member = send_ids(app, gather, {"id": "member", "group": "g", "chord": body}, body)
        unlock = app.tasks[CHORD_UNLOCK]
        asked = [send_ids(app, unlock, {"id": str(n), "args": ["g", body]}, body) for n in range(2)]
        assert asked == [member, member]

    def test_is_another_send_when_the_chord_is_sent_anew(self, app: Celery, gather: Any) -> None:
        body = as_sent(gather.s())
        one, other = (
            send_ids(app, gather, {"id": "member", "group": name, "chord": body}, body) for name in ("g", "h")
        )
        assert one != other


class TestWhatIsNoBody:
    def test_each_send_of_a_member_of_its_own_is_another_one(self, app: Celery, gather: Any) -> None:
        body = as_sent(gather.s())
        request = {"id": "member", "group": "g", "chord": body}
        other = gather.s().set(task_id="other")
        assert send_ids(app, gather, request, other) != send_ids(app, gather, request, other)

    def test_each_send_of_a_task_in_no_chord_is_another_one(self, app: Celery, gather: Any) -> None:
        body = as_sent(gather.s())
        request = {"id": "member", "group": "g", "chord": None}
        assert send_ids(app, gather, request, body) != send_ids(app, gather, request, body)


# -- the question whether all members are there ------------------------------------------------------


@pytest.fixture
def plain(app: Celery) -> Any:
    @app.task(name="proj.plain", shared=False)
    def plain(values: Any) -> Any:
        return values

    return plain


@pytest.fixture
def asked(app: Celery) -> Any:
    """Ask, by a message with an ETA: what went to the broker, and what is a row."""

    app.durable.upgrade()

    def ask(body: Any, members: list[str], **options: Any) -> tuple[int, int]:
        rows = len(rows_of(app))
        arguments = ("g", as_sent(body)), {"result": [[member, None] for member in members]}
        with app.connection_for_write() as connection:
            queue = connection.SimpleQueue("celery")
            queue.clear()
            app.tasks[CHORD_UNLOCK].apply_async(*arguments, countdown=9, **options)
            return len(queue), len(rows_of(app)) - rows

    return ask


def rows_of(app: Celery) -> list[Any]:
    with app.durable.store.database.statements() as connection:
        found = connection.exec_driver_sql("SELECT headers FROM durable_executions WHERE status = 'outbox'")
        return [json.loads(headers) for (headers,) in found]


def test_about_a_durable_body_it_is_a_row_and_no_worker_s_clock_decides(
    app: Celery, gather: Any, asked: Any
) -> None:
    assert asked(gather.s(), ["member"]) == (0, 1)
    assert rows_of(app)[0]["eta"] is None


def test_about_the_durable_first_task_of_a_body_too(gather: Any, plain: Any, asked: Any) -> None:
    assert asked(gather.s() | plain.s(), ["member"]) == (0, 1)


def test_about_plain_tasks_it_is_celery_s(plain: Any, asked: Any) -> None:
    assert asked(plain.s(), ["member"]) == (1, 0)
    assert asked(plain.s(), ["member"], retries=3) == (1, 0)


def test_asked_again_about_a_member_that_has_a_row_it_is_a_row(
    app: Celery, gather: Any, plain: Any, asked: Any
) -> None:
    gather.apply_async(([],), task_id="member", countdown=1)
    assert asked(plain.s(), ["member"]) == (1, 0)
    assert asked(plain.s(), ["member"], retries=3) == (0, 1)

    app.durable.cancel("member")
    assert asked(plain.s(), ["member"], retries=3) == (0, 1)


def test_of_a_chord_that_follows_a_durable_task_it_is_written_with_the_members(
    gather: Any, asked: Any
) -> None:
    with capturing() as caught:
        assert asked(gather.s(), ["member"]) == (0, 0)

    (question,) = caught
    assert question.due is not None
    assert question.headers["eta"] is None


def test_an_argument_that_looks_like_a_durable_task_makes_no_chord_of_one(plain: Any, asked: Any) -> None:
    assert asked(plain.s({"task": "proj.gather"}), ["member"]) == (1, 0)
