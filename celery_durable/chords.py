"""Chords: a body that runs once, and a question that may be asked for days.

On result stores that cannot count ``celery.chord_unlock`` asks whether all members are ready: once a second,
by a message that a worker holds for that second. While a durable member sleeps this would go on for days, and
a worker whose clock is slow would hold it for as long as that is wrong. So for a chord with durable tasks in
it the question is a row, and is asked less and less often.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from typing import Any

from celery import current_task
from kombu.utils.objects import cached_property

from celery_durable.capture import Captured, DurableAMQP, capturing, due_at, is_capturing, is_durable
from celery_durable.errors import StoreUnavailable
from celery_durable.followers import follower_of
from celery_durable.records import Due
from celery_durable.store import Store

logger = logging.getLogger(__name__)

CHORD_UNLOCK = "celery.chord_unlock"
#: The namespace of the send ids of chord bodies, fixed for ever.
BODIES = uuid.UUID("9f0c2f52-0a3e-5d1c-8c70-2b6f6a1f5f0e")
#: Each pause is so much longer than the last one: a chord goes on an eighth later than it could.
GROWTH = 1.125
#: The longest pause, in seconds.
CEILING = 300.0


class ChordAMQP(DurableAMQP):
    """Celery's AMQP api, which lets questions about chords of durable tasks wait as rows."""

    @cached_property
    def send_task_message(self) -> Any:
        send = super().send_task_message

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            if name != CHORD_UNLOCK or not self._waits_as_row(message):
                return send(producer, name, message, **options)
            pause = self._pause(message.headers["retries"] or 0)
            untimed = message._replace(headers={**message.headers, "eta": None})
            if is_capturing():
                # The chord follows a durable task: whoever writes its members writes this with them.
                with due_at(pause):
                    return send(producer, name, untimed, **options)
            with capturing() as caught:
                send(producer, name, untimed, **options)
            return None if self._keep(caught[0], pause) else send(producer, name, message, **options)

        return send_task_message

    @property
    def _store(self) -> Store:
        app: Any = self.app
        store: Store = app.durable.store
        return store

    def _waits_as_row(self, message: Any) -> bool:
        """Whether this asks about a chord with a durable body, or of whose members one has a row."""
        headers = message.headers
        if not headers.get("eta"):
            return False
        args, kwargs, _ = message.body
        if any(is_durable(self.app, name) for name in _tasks_in(args[1:2])):
            return True
        if not headers.get("retries"):
            # The members are being sent.
            return False
        try:
            return self._store.queries.any_known(list(_ids_in(kwargs.get("result"))))
        except StoreUnavailable:
            return False

    def _pause(self, retries: int) -> Due:
        base = float(self.app.conf.result_chord_retry_interval)
        return Due(seconds=min(base * GROWTH ** min(retries, 1000), max(base, CEILING)))

    def _keep(self, captured: Captured, pause: Due) -> bool:
        try:
            self._store.outbox.post(follower_of(self.app, captured), pause)
        except StoreUnavailable as error:
            logger.warning("A chord's question is left to the broker: %s", error)
            return False
        return True


def ask_again(app: Any) -> None:
    """Have the broker keep a question until it is answered: a chord must not end with the worker that asks.

    Celery acknowledges it before, unless told otherwise. Asked twice, it sends the body twice, as one send.
    """
    task = app.tasks[CHORD_UNLOCK]
    task.acks_late = task.reject_on_worker_lost = True


def body_send_id(task_id: str) -> str | None:
    """The send id of ``task_id`` if the task that runs here sends it as the body of a chord; else None.

    Who finds that all members are there sends the body, and does so again when it dies before that is noted.
    By one id for all these sends the body runs once, even if it has come to its end between them.
    """
    request = getattr(current_task, "request", None)
    if request is None:
        return None
    if current_task.name == CHORD_UNLOCK:
        group_id, body = request.args[:2]
    else:
        group_id, body = request.group, request.chord
    if not group_id or task_id not in _sent_ids(body):
        return None
    return str(uuid.uuid5(BODIES, f"{group_id}/{task_id}"))


def _tasks_in(signature: Any) -> Iterator[str]:
    """Every task that a signature, and what it is made of, names."""
    for part in _dicts_in(signature):
        # An argument may have a key of that name.
        if "subtask_type" in part:
            yield part["task"]


def _sent_ids(signature: Any) -> Iterator[str]:
    """Every task id that a signature, and what it is made of, will be sent under."""
    for part in _dicts_in(signature):
        options = part.get("options")
        if isinstance(options, dict) and options.get("task_id"):
            yield options["task_id"]


def _dicts_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _dicts_in(part)


def _ids_in(result: Any) -> Iterator[str]:
    """Every id in the tuples that stand for results: of tasks, of groups, of those before them in a chain."""
    if isinstance(result, str):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from _ids_in(item)
