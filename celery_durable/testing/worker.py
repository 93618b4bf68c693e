"""A worker in the thread of the test: it takes messages from the broker and runs them one by one."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery import signals
from celery.exceptions import TaskRevokedError
from celery.worker import request as requests
from kombu.utils.imports import symbol_by_name

from celery_durable.testing.broker import Broker, Mailbox
from celery_durable.testing.faults import Faults
from celery_durable.testing.isolation import current
from celery_durable.testing.side import HOSTNAME, InProcessSide


@dataclass(frozen=True, slots=True)
class Sent:
    """A message for a task that the app does not know: somebody else's, so it is not run."""

    task: str
    task_id: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(order=True)
class Held:
    """A message of a plain task with an ETA."""

    eta: datetime
    number: int
    request: Any = field(compare=False)


class InProcessWorker:
    """Runs durable tasks as Celery's worker does: by their request class, the tracer and a pool.

    ``now()`` gives the durable time.
    """

    def __init__(self, app: Any, broker: Broker, faults: Faults, now: Callable[[], datetime]) -> None:
        self.app = app
        self.side = InProcessSide(app.durable)
        self.sent: list[Sent] = []
        #: Raise what a task raises, after its result has been stored.
        self.propagates = False
        self._faults = faults
        self._now = now
        self._connection = app.connection_for_read()
        self._mailbox = Mailbox(broker, self._connection)
        self._held: list[Held] = []
        self._numbers = itertools.count()
        self._failures: list[BaseException] = []
        signals.task_failure.connect(self._note_failure)

    def close(self) -> None:
        """Let go of the broker."""
        signals.task_failure.disconnect(self._note_failure)
        self._connection.release()

    @property
    def next_eta(self) -> datetime | None:
        """When the next plain task that waits here is due."""
        return self._held[0].eta if self._held else None

    def run_next(self) -> bool:
        """Run the next message. False: there is none."""
        if self._held and self._held[0].eta <= self._now():
            self._execute(heapq.heappop(self._held).request)
            return True
        message = self._mailbox.take()
        if message is None:
            return False
        request = self._request(message)
        if request is None:
            return True
        signals.task_received.send(sender=self, request=request)
        if request.eta is not None and request.eta > self._now():
            heapq.heappush(self._held, Held(request.eta, next(self._numbers), request))
        else:
            self._execute(request)
        return True

    def _request(self, message: Any) -> Any:
        """The request of a message; None where it is not for us."""
        name = message.headers.get("task")
        task = self.app.tasks.get(name)
        if task is None:
            message.ack()
            if name is not None:
                args, kwargs, _ = message.payload
                self.sent.append(Sent(name, message.headers["id"], tuple(args), dict(kwargs)))
            return None
        base = symbol_by_name(task.Request)
        celerys: Any = requests  # the stubs leave out what a worker makes its requests by
        made = celerys.create_request_cls(base, task, InlinePool(), HOSTNAME, None, app=self.app)
        return made(
            message,
            on_ack=message.ack_log_error,
            on_reject=message.reject_log_error,
            app=self.app,
            hostname=HOSTNAME,
            task=task,
            body=message.body,
            headers=message.headers,
            utc=self.app.uses_utc_timezone(),
        )

    def _execute(self, request: Any) -> None:
        with current(self.app), self._faults.process():
            try:
                request.execute_using_pool(InlinePool())
            except TaskRevokedError:
                pass
            except SystemExit as death:
                lost = WorkerLostError(f"the task has ended its process: {death!r}")
                request.on_failure(_info_of(lost))
        if not request.message.acknowledged:
            request.message.requeue()
        self._raise_problems()

    def _note_failure(self, exception: BaseException | None = None, **_: Any) -> None:
        if self.propagates and exception is not None:
            self._failures.append(exception)

    def _raise_problems(self) -> None:
        problems: list[BaseException] = [*self.side.problems, *self._failures]
        self.side.problems.clear()
        self._failures.clear()
        if problems:
            raise problems[0]


class InlinePool:
    """A pool of one: it runs the task before it returns."""

    def apply_async(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        accept_callback: Callable[..., Any],
        callback: Callable[..., Any],
        **_: Any,
    ) -> None:
        accept_callback(0, 0.0)
        callback(target(*args))


def _info_of(error: BaseException) -> Any:
    try:
        raise error
    except type(error):
        return ExceptionInfo()
