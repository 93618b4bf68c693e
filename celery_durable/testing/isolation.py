"""Putting a user's app on parts in memory for one test, and back on its own after it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from celery import _state

from celery_durable.checks import URL_VARIABLE
from celery_durable.errors import ConfigurationError
from celery_durable.settings import PREFIX
from celery_durable.store.memory import store_in_memory
from celery_durable.testing.broker import Broker, Transport
from celery_durable.testing.faults import Faults, guard
from celery_durable.testing.others import others_refused
from celery_durable.testing.results import BACKEND, MemoryBackend
from celery_durable.testing.side import StillHeartbeats
from celery_durable.testing.timeline import Timeline

#: Each of these would win over what is configured here.
VARIABLES = (
    "CELERY_BROKER_URL",
    "CELERY_BROKER_READ_URL",
    "CELERY_BROKER_WRITE_URL",
    "CELERY_RESULT_BACKEND",
    URL_VARIABLE,
)
IN_MEMORY = "sqlite://"
#: Where Celery and its apps keep what they have made from their settings.
_MADE = ("amqp", "control", "events")


@contextmanager
def isolated(app: Any, timeline: Timeline, faults: Faults, config: Mapping[str, Any]) -> Iterator[Broker]:
    """Within this block the app has a broker, a result store and a database of its own, in memory.

    The other apps of the process send nothing meanwhile.

    Raises ConfigurationError where the app is not durable, or cannot be parted from its own.
    """
    durable = getattr(app, "durable", None)
    if durable is None:
        raise ConfigurationError(
            f"app {app.main!r} is not durable: call Durable(app) where it is made, or return another app"
            " from the fixture durable_celery_app"
        )
    # As a worker does at its start: the tasks are known, and the settings are read.
    app.loader.import_default_modules()
    app.finalize()
    app.conf.get("broker_url")
    broker = Broker(faults.may_write)
    with ExitStack() as stack:
        stack.enter_context(_without_variables())
        stack.enter_context(_restored(vars(app)))
        stack.enter_context(_restored(vars(durable)))
        stack.enter_context(_without_tracers(app))
        stack.enter_context(current(app))
        _configure(app, broker, config)
        _stop_clock_of(app, timeline)
        stack.enter_context(_store_replaced(durable, timeline, faults, config))
        _check(app)
        stack.enter_context(others_refused(app))
        yield broker


def _configure(app: Any, broker: Broker, config: Mapping[str, Any]) -> None:
    app.conf = app.conf.copy()
    app.conf.update(config)
    app.conf.update(
        broker.settings(),
        result_backend=BACKEND,
        result_backend_transport_options={},
        task_always_eager=False,
    )
    for name in _MADE:
        vars(app).pop(name, None)
    # Connections and the result store, as an app has them before it first uses them.
    app._pool = None
    app._local = threading.local()
    app._backend_cache = None


def _stop_clock_of(app: Any, timeline: Timeline) -> None:
    """Celery reckons countdowns by ``app.now()``."""
    app.now = lambda: timeline.now.astimezone(app.timezone)


@contextmanager
def _store_replaced(
    durable: Any, timeline: Timeline, faults: Faults, config: Mapping[str, Any]
) -> Iterator[None]:
    durable.reset(**{name: value for name, value in config.items() if name.startswith(PREFIX)})
    durable.reset(database_url=IN_MEMORY, engine_options={}, schema=None, notify=False)
    settings = durable.settings
    with (
        store_in_memory(namespace=settings.namespace, prefix=settings.table_prefix) as store,
        _restored(vars(store.database)),
    ):
        timeline.attach(store.stopped_at)
        guard(store.database, faults.may_write)
        durable.store = store
        durable.runtime.heartbeats = StillHeartbeats(store.heartbeats)
        timeline.on_moved = durable.runtime.heartbeats.renew_due
        yield


def _check(app: Any) -> None:
    """Nothing of what the app really uses may be within reach of a test."""
    connection = app.connection_for_write()
    wrong = [
        what
        for what, is_ours in {
            "broker": isinstance(connection.transport, Transport),
            "result store": isinstance(app.backend, MemoryBackend),
            "database": app.durable.store.database.is_in_memory,
        }.items()
        if not is_ours
    ]
    connection.release()
    if wrong:
        raise ConfigurationError(
            f"the {' and the '.join(wrong)} of app {app.main!r} could not be replaced for the test"
        )


# -- restoring -----------------------------------------------------------------------------------


@contextmanager
def _restored(attributes: dict[str, Any]) -> Iterator[None]:
    """Put an object's attributes back as they were."""
    before = dict(attributes)
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(before)


@contextmanager
def _without_variables() -> Iterator[None]:
    before = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


@contextmanager
def _without_tracers(app: Any) -> Iterator[None]:
    """A tracer remembers the result store that it was built with. Where there is none, Celery builds one."""
    _drop_tracers(app)
    try:
        yield
    finally:
        _drop_tracers(app)


def _drop_tracers(app: Any) -> None:
    for task in app.tasks.values():
        task.__trace__ = None


@contextmanager
def current(app: Any) -> Iterator[None]:
    """The current app is this one, as in a worker."""
    state: Any = _state
    before = getattr(state._tls, "current_app", None)
    state._set_current_app(app)
    try:
        yield
    finally:
        state._set_current_app(before)
