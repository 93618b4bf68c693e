"""DurableTask: the base class of tasks that sleep as rows and run under a lease."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from celery import Task
from celery.canvas import _chain, chord
from celery.exceptions import Ignore
from celery.result import AsyncResult, allow_join_result
from kombu.serialization import registry  # type: ignore[attr-defined]
from kombu.utils.uuid import uuid

from celery_durable.api import sleep, sleep_until, step
from celery_durable.calling import as_body, call
from celery_durable.capture import Captured, capturing, due_at, is_capturing, is_durable, under_parent
from celery_durable.chords import body_send_id
from celery_durable.errors import ConfigurationError, StoreUnavailable
from celery_durable.followers import follower_of
from celery_durable.logs import about
from celery_durable.message import delivery_from_headers, instant_of_header, mark_of, mark_send
from celery_durable.points import Point, reached
from celery_durable.records import Due, Message, Refusal
from celery_durable.run import claimed_run
from celery_durable.settings import UNSET, Unset
from celery_durable.telling import TellingBackend
from celery_durable.tracing import durable_tracer

logger = logging.getLogger(__name__)


P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
Q = ParamSpec("Q")
R = TypeVar("R")

if TYPE_CHECKING:

    class _Task(Task[P, R_co], Generic[P, R_co]):
        """Celery's task, with the parameters and the result of its body; also where Celery is not typed."""

        def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R_co]: ...

else:

    class _Task(Task):
        abstract = True
        # Before 5.7 Celery's own has none.
        __class_getitem__ = classmethod(GenericAlias)


class DurableTask(_Task[P, R_co]):
    """A task whose sleeps are rows and whose runs hold a lease.

    ``@app.task(base=DurableTask)``, ``@shared_task(base=DurableTask)`` or ``Celery(task_cls=DurableTask)``;
    the app needs ``Durable(app)``.
    """

    abstract = True
    #: Tells a durable task from a plain one where its class cannot be imported.
    is_durable = True
    Request = "celery_durable.worker.request:DurableRequest"

    #: Seconds without a renewal after which the task belongs to whoever claims it next.
    lease_ttl: float | timedelta | Unset = UNSET
    #: Seconds between renewals.
    heartbeat_interval: float | timedelta | Unset = UNSET
    #: Seconds from asking a run that lost its lease to stop, to killing it where the pool can.
    revoke_grace: float | timedelta | Unset = UNSET
    #: Crashes since the last progress before the task is quarantined; None: no limit.
    max_crashes: int | Unset | None = UNSET
    #: Whether ``countdown``, ``eta`` and ``retry`` wait as rows.
    durable_eta: bool | Unset = UNSET

    sleep = staticmethod(sleep)
    sleep_until = staticmethod(sleep_until)

    _durable_trace: Callable[..., Any] | None = None

    def step(self, fn: Callable[Q, R], /, *args: Q.args, **kwargs: Q.kwargs) -> R:
        """See ``celery_durable.step``."""
        return step(fn, *args, **kwargs)

    @classmethod
    def on_bound(cls, app: Any) -> None:
        # The claim decides when a message is acknowledged; Celery must not do it at the start.
        cls.acks_late = True
        super().on_bound(app)

    @property
    def __trace__(self) -> Callable[..., Any] | None:
        return self._durable_trace

    @__trace__.setter
    def __trace__(self, trace: Callable[..., Any] | None) -> None:
        # Celery builds a tracer for each task when a worker process starts, and assigns it here. It gets the
        # same again, but for what that says of a park.
        self._durable_trace = None if trace is None else durable_tracer(self)

    def start_strategy(self, app: Any, consumer: Any, **options: Any) -> Any:
        # Called when a worker starts: without the extension it could only fail at the first message.
        self._durable()
        return super().start_strategy(app, consumer, **options)

    @property
    def backend(self) -> Any:
        backend = super().backend
        run = claimed_run()
        return backend if run is None or run.task is not self else TellingBackend(backend, run)

    @backend.setter
    def backend(self, value: Any) -> None:
        self._backend = value

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Its own, or that of a class beside this one.
        if not getattr(cls.__call__, "enters_run", False):
            cls.__call__ = as_body(cls.__call__)  # type: ignore[method-assign]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        value: R_co = call(self, args, kwargs)
        return value

    __call__.enters_run = True  # type: ignore[attr-defined]

    def _durable(self) -> Any:
        durable = getattr(self.app, "durable", None)
        if durable is None:
            raise ConfigurationError(
                f"task {self.name} is durable, but its app is not: call Durable(app) first"
            )
        return durable

    # -- sending --------------------------------------------------------------------------------

    def apply_async(  # type: ignore[override]
        self, args: Any = None, kwargs: Any = None, task_id: str | None = None, **options: Any
    ) -> Any:
        """As Celery's; with a ``countdown`` or ``eta`` the message waits as a row (``durable_eta``).

        Raises:
            StoreUnavailable: the row could not be written (a kombu OperationalError).
        """
        durable = self._durable()
        if self.app.conf.task_always_eager:
            return super().apply_async(args, kwargs, task_id=task_id, **options)
        task_id = task_id or uuid()
        own = self._retried_run(task_id, options)
        if own is not None:
            return self._retry_of(own, args, kwargs, task_id, options)
        if not mark_of(options.get("headers") or {}):
            send_id = body_send_id(task_id)
            if send_id is not None:
                options["headers"] = mark_send(options.get("headers"), send_id)
                if not is_capturing():
                    return self._send_body(durable, args, kwargs, task_id, options)
        due = self._due(options)
        if due is None or not durable.limits(self).eta:
            return super().apply_async(args, kwargs, task_id=task_id, **options)
        options = self._with_eta_as_header(options)
        if is_capturing():
            with due_at(due):
                return super().apply_async(args, kwargs, task_id=task_id, **options)
        with capturing() as caught:
            result = super().apply_async(args, kwargs, task_id=task_id, **options)
        for captured in caught:
            self._schedule(durable, captured, due)
        return result

    def _send_body(self, durable: Any, args: Any, kwargs: Any, task_id: str, options: dict[str, Any]) -> Any:
        """Send the body of a chord, or its first task, as followers are sent.

        It is a row before it is a message: Celery fails a chord whose body the broker does not take.
        """
        with capturing() as caught:
            result = self.apply_async(args, kwargs, task_id, **options)
        try:
            ended = durable.store.outbox.begin(follower_of(self.app, caught[0]))
        except StoreUnavailable as error:
            if self._due(options) is not None:
                error.broke_off("a send")
                raise
            logger.warning(
                "%s[%s], the body of a chord, is left to the broker: %s",
                self.name,
                task_id,
                error,
                extra=about(self.name, task_id),
            )
            return super().apply_async(args, kwargs, task_id=task_id, **options)
        if ended.refused:
            logger.info(
                "%s[%s], a chord's body, was sent before", self.name, task_id, extra=about(self.name, task_id)
            )
        durable.send(ended.outgoing)
        return result

    def _schedule(self, durable: Any, captured: Captured, due: Due) -> None:
        delivery = delivery_from_headers(self.app, captured.headers, captured.message)
        try:
            refusal: Refusal | None = durable.schedule(delivery, due)
        except StoreUnavailable as error:
            error.broke_off("a send")
            raise
        reached(Point.SEND_SCHEDULED)
        if refusal is not None:
            logger.warning(
                "%s[%s] was not scheduled: %s",
                self.name,
                delivery.task_id,
                refusal.reason,
                extra=about(self.name, delivery.task_id),
            )

    def _due(self, options: dict[str, Any]) -> Due | None:
        """When a send is due; None where it is at once."""
        eta, countdown = options.get("eta"), options.get("countdown")
        if countdown:
            return Due(seconds=max(0.0, float(countdown)))
        if not eta:
            return None
        # As a worker of Celery's reads it: a naive one is in UTC.
        return Due(at=instant_of_header(self.app, eta))

    def _with_eta_as_header(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options without countdown and eta, but for the header: the row keeps the time.

        Left to Celery, RabbitMQ's native delayed delivery would change the route of the message.
        """
        options = dict(options)
        countdown, eta = options.pop("countdown", None), options.pop("eta", None)
        if countdown:
            eta = self.app.now() + timedelta(seconds=max(0.0, float(countdown)))
        text = eta.isoformat() if isinstance(eta, datetime) else eta
        options["headers"] = {**(options.get("headers") or {}), "eta": text}
        return options

    # -- retry and replace ----------------------------------------------------------------------

    def _retried_run(self, task_id: str, options: dict[str, Any]) -> Any:
        """The run of this very task, if this send is its retry."""
        run = claimed_run()
        if run is None or run.task is not self or run.lease.task_id != task_id:
            return None
        return run if options.get("retries", 0) > (self.request.retries or 0) else None

    def _retry_of(self, run: Any, args: Any, kwargs: Any, task_id: str, options: dict[str, Any]) -> Any:
        """Keep the message of a retry until Celery has told of it; then the run parks with it."""
        due = self._due(options) or Due()
        request = self.request
        try:
            same = _same(args or (), request.args or ()) and _same(kwargs or {}, request.kwargs or {})
            options = self._as_it_came(run.delivery.message, self._with_eta_as_header(options), same=same)
            with capturing() as caught:
                result = super().apply_async(args, kwargs, task_id=task_id, **options)
        except Exception as error:
            run.retry_failure = error
            raise
        reached(Point.RETRY_BUILT)
        run.retry = (under_parent(caught[-1], request.parent_id), due, not same)
        return result

    def _as_it_came(self, message: Message, options: dict[str, Any], *, same: bool) -> dict[str, Any]:
        """The options of a retry, with those of the task's message that Celery's own retry forgets."""
        request: Any = self.request
        kept = {
            "serializer": registry.type_to_name.get(message.content_type),
            "compression": message.compression,
        }
        if same:
            kept |= {"argsrepr": request.argsrepr, "kwargsrepr": request.kwargsrepr}
        return {**{name: value for name, value in kept.items() if value is not None}, **options}

    def on_replace(self, sig: Any) -> Any:
        """As Celery's: the signature takes the id over, and is known as the successor of this very send."""
        run = claimed_run()
        if self.request.is_eager:
            # Celery gets the successor's result right here, and forbids it to itself where all is eager.
            with allow_join_result():
                return super().on_replace(sig)
        if run is None or run.task is not self:
            return super().on_replace(sig)
        run.execution.go_on()
        if run.delivery.send_id is not None:
            self._hand_on(sig, run.delivery.send_id, run.lease.token)
        try:
            return super().on_replace(sig)
        except Ignore:
            # It has been published: the row ends as replaced when Celery is done with this run.
            reached(Point.REPLACEMENT_SENT)
            run.replaced = True
            raise

    def _hand_on(self, sig: Any, send_id: str, token: int) -> None:
        for link in _links_of(sig):
            if link.options.get("task_id") == self.request.id and is_durable(self.app, link.task):
                link.options["headers"] = mark_send(link.options.get("headers"), send_id, predecessor=token)


def _same(one: Any, other: Any) -> bool:
    """Whether arguments are the same; a list and a tuple may be."""
    return bool(type(other)(one) == other)


def _links_of(sig: Any) -> Iterator[Any]:
    """A signature and those in it that may carry its id: the links of a chain, the body of a chord."""
    yield sig
    inner = [sig.body] if isinstance(sig, chord) else sig.tasks if isinstance(sig, _chain) else []
    for link in inner:
        yield from _links_of(link)
