"""Durable: installs everything into a Celery app. ``app.durable`` is the installed object."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from celery import Celery
from celery.signals import after_setup_logger, after_setup_task_logger, worker_shutting_down
from celery.utils.time import make_aware
from kombu import serialization
from kombu.utils.objects import cached_property

from celery_durable.checks import URL_VARIABLE
from celery_durable.claiming import Claiming
from celery_durable.codec import Codec
from celery_durable.control import REASON, install_control
from celery_durable.dispatch import Dispatcher
from celery_durable.durations import instant_of
from celery_durable.errors import ConfigurationError, StoreUnavailable
from celery_durable.local import embedded_defaults, is_embedded
from celery_durable.logs import about, add_run_fields
from celery_durable.operations import Operations
from celery_durable.records import Delivery, Due, Outgoing, Refusal
from celery_durable.runtime import Runtime
from celery_durable.sender import Sender
from celery_durable.settings import Settings, TaskSettings
from celery_durable.store import Store
from celery_durable.task import DurableTask
from celery_durable.worker.side import WorkerSide
from celery_durable.worker.steps import ClaimsReader, DurableStep

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

CONSUMER = "celery_durable.worker.consumer:DurableConsumer"
SCHEDULER = "celery_durable.beat:DurableScheduler"


class Durable(Operations):
    """The extension of one Celery app.

    ``Durable(app, lease_ttl=30)`` or ``durable = Durable()`` and later ``durable.init_app(app)``. Keyword
    arguments are the ``durable_…`` settings, with or without that prefix; they win over the configuration.
    """

    def __init__(self, app: Celery | None = None, **settings: object) -> None:
        self._overrides = settings
        self._runtime: Runtime | None = None
        self._lock, self._lock_of = threading.Lock(), os.getpid()
        self._limits: dict[str, TaskSettings] = {}
        self.worker: WorkerSide | None = None
        self.app: Celery = None  # type: ignore[assignment]
        if app is not None:
            self.init_app(app)

    # -- installing ------------------------------------------------------------------------------

    def init_app(self, app: Celery) -> None:
        """Install into ``app``. Doing it again changes nothing."""
        installed = getattr(app, "durable", None)
        if installed is self:
            return
        if installed is not None:
            raise ConfigurationError(f"Durable is installed in app {app.main!r} already: use app.durable")
        self.app = app
        self._install(app)

    def _install(self, app: Any) -> None:
        app.durable = self
        app.amqp_cls = "celery_durable.chords:ChordAMQP"
        # What was made before by Celery's own class is made again when it is next used.
        app.__dict__.pop("amqp", None)
        install_control(app)
        app.steps["worker"].add(DurableStep)
        app.steps["consumer"].add(ClaimsReader)
        after_setup_logger.connect(add_run_fields)
        after_setup_task_logger.connect(add_run_fields)
        app.on_after_configure.connect(self._configure, weak=False)
        if app.configured:
            self._configure()

    def _configure(self, **_: Any) -> None:
        """Fill in what the user left open, when the configuration is first read."""
        conf = self.app.conf
        if self._is_left_to_us(conf):
            defaults = embedded_defaults(Path.cwd())
            if conf.result_backend or os.environ.get("CELERY_RESULT_BACKEND"):
                for name in ("result_backend", "database_engine_options", "database_create_tables_at_setup"):
                    del defaults[name]
            conf.update(defaults)
        if conf.beat_scheduler == "celery.beat:PersistentScheduler":
            conf.beat_scheduler = SCHEDULER
        if conf.worker_consumer == "celery.worker.consumer:Consumer":
            conf.worker_consumer = CONSUMER

    def _is_left_to_us(self, conf: Any) -> bool:
        """No broker and no database server is configured: everything runs on one machine, from files."""
        names = ("broker_url", "broker_read_url", "broker_write_url")
        if any(conf.get(name) for name in names) or os.environ.get("CELERY_BROKER_URL"):
            return False
        url = os.environ.get(URL_VARIABLE) or self._overrides.get("database_url")
        url = url or conf.get("durable_database_url")
        return not url or str(url).startswith("sqlite")

    def reset(self, **settings: object) -> None:
        """Forget what was read from the configuration, and what was opened by it.

        Nothing is closed. ``settings`` win over the configuration from now on, as those that the extension
        was made with do. For tests, and for whoever has changed the configuration after its first use.
        """
        self._overrides = {**self._overrides, **settings}
        self._runtime = None
        self._limits = {}
        self.worker = None
        for name in ("settings", "store", "_in_process_claims", "_sender"):
            self.__dict__.pop(name, None)

    @overload
    def task(self, fun: Callable[P, R], /) -> DurableTask[P, R]: ...
    @overload
    def task(
        self, *, bind: Literal[True], **options: Any
    ) -> Callable[[Callable[Concatenate[Any, P], R]], DurableTask[P, R]]: ...
    @overload
    def task(
        self, *, bind: Literal[False] = ..., **options: Any
    ) -> Callable[[Callable[P, R]], DurableTask[P, R]]: ...

    def task(self, *args: Any, **options: Any) -> Any:
        """``app.task(base=DurableTask, …)`` in short."""
        options.setdefault("base", DurableTask)
        return self.app.task(*args, **options)

    # -- what is configured ------------------------------------------------------------------------

    @cached_property
    def settings(self) -> Settings:
        """The checked settings. Raises ConfigurationError, naming every problem."""
        serializers: Any = serialization.registry.name_to_type  # type: ignore[attr-defined]
        return Settings.from_conf(
            self.app.conf,
            app_name=self.app.main,
            embedded=is_local(self.app.conf),
            overrides=self._overrides,
            serializers=serializers,
        )

    @cached_property
    def store(self) -> Store:
        """The store, safe to use in any process and thread."""
        settings = self.settings
        return Store(
            settings.database_url,
            namespace=settings.namespace,
            prefix=settings.table_prefix,
            schema=settings.schema,
            engine_options=settings.engine_options,
            heartbeat_timeout=max(settings.heartbeat_interval / 2, 0.5),
            notify_within=settings.poll_interval if settings.notify else None,
        )

    @property
    def runtime(self) -> Runtime:
        """What this process has; another one after a fork."""
        runtime = self._runtime
        if runtime is None or runtime.pid != os.getpid():
            if self._lock_of != os.getpid():
                # Inherited over a fork, it may be held by a thread that is not here.
                self._lock, self._lock_of = threading.Lock(), os.getpid()
            with self._lock:
                if self._runtime is runtime:
                    self._runtime = self._new_runtime()
                runtime = self._runtime
        assert runtime is not None
        return runtime

    def _new_runtime(self) -> Runtime:
        conf = self.app.conf
        node = self.worker.node if self.worker is not None else f"{self.app.main or 'celery'}"
        return Runtime(
            self.settings,
            self.store,
            node=node,
            serializer=self.settings.serializer or conf.result_serializer,
            result_serializer=conf.result_serializer,
        )

    @property
    def eager_codec(self) -> Codec:
        """The codec of eager runs, which need no database."""
        conf = self.app.conf
        serializer = conf.get("durable_serializer") or conf.result_serializer
        return Codec(serializer, int(conf.get("durable_payload_limit") or 1 << 20))

    @property
    def step_limit(self) -> int:
        """The step limit of eager runs."""
        return int(self.app.conf.get("durable_step_limit") or 10_000)

    def limits(self, task: Any) -> TaskSettings:
        """What holds for one task."""
        found = self._limits.get(task.name)
        if found is None:
            found = self._limits[task.name] = self.settings.for_task(task)
        return found

    def check_configuration(self) -> None:
        """What a worker or scheduler does first of all: a wrong setting stops it there, never later.

        Raises ConfigurationError, of the settings or of a task's own options.
        """
        self.settings  # noqa: B018 - it is checked when it is made
        for task in list(self.app.tasks.values()):
            if isinstance(task, DurableTask):
                self.limits(task)

    def crash_limits(self, task_name: str) -> tuple[int | None, float]:
        """The crash limit and lease ttl of a task, also of one that this process does not know."""
        task = self.app.tasks.get(task_name)
        if task is None:
            return self.settings.max_crashes, self.settings.lease_ttl
        limits = self.limits(task)
        return limits.max_crashes, limits.lease_ttl

    def instant_of(self, when: datetime) -> datetime:
        """An instant in UTC; a naive one is read in the app's timezone, by Celery's own rule."""
        return instant_of(when, self.app.timezone, make_aware)

    # -- tables ------------------------------------------------------------------------------------

    def upgrade(self) -> None:
        """Create or migrate the tables."""
        self.store.upgrade()

    def prepare_tables(self) -> None:
        """What a worker or scheduler does at its start (``durable_auto_upgrade``)."""
        if self.settings.auto_upgrade:
            self.store.upgrade()
        else:
            self.store.check()

    # -- the worker --------------------------------------------------------------------------------

    def enter_worker(self, worker: Any) -> None:
        """Called by the worker's bootstep, before its pool forks."""
        self.check_configuration()
        self.worker = WorkerSide(self, worker)
        self._runtime = None
        self.__dict__.pop("_in_process_claims", None)
        worker_shutting_down.connect(self._on_worker_shutting_down, weak=False)
        self.prepare_tables()

    def _on_worker_shutting_down(self, **_: Any) -> None:
        # Celery sends this from its signal handler, as the first thing.
        if self.worker is not None:
            self.worker.shutting_down()

    @cached_property
    def _in_process_claims(self) -> Claiming:
        assert self.worker is not None
        return self.worker.claiming()

    @property
    def claims(self) -> Claiming:
        """How this process claims what arrives."""
        return self._in_process_claims

    @cached_property
    def _sender(self) -> Sender:
        return Sender(self.app, self.store, lambda: self.settings.resend_delay)

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Send followers right after their commit, in one try; the scheduler sends what is left."""
        self._sender.send(outgoing)

    def schedule(self, delivery: Delivery, due: Due) -> Refusal | None:
        """Write a message as a row that is sent when it is due.

        Raises StoreUnavailable.
        """
        return self.store.claims.schedule(delivery, due)

    def cancel_discarded(self, task_id: str) -> bool:
        """A worker discards this task for a reason of its own: its row must not bring it back.

        False: the database is away.
        """
        try:
            self.store.verdicts.cancel([task_id], REASON)
        except StoreUnavailable as error:
            logger.warning(
                "%s is revoked here, its row does not know yet: %s",
                task_id,
                error,
                extra=about(None, task_id),
            )
            return False
        return True

    # -- the scheduler's work ----------------------------------------------------------------------

    def dispatcher(self) -> Dispatcher:
        """A dispatcher with a broker connection of its own."""
        return Dispatcher(self.app, self.runtime, self.crash_limits)

    def dispatch_due(self) -> int:
        """Send a wake message for everything that is due now. Returns how many were due."""
        # Of a lease that has run out, the task says how many crashes are too many.
        self.app.loader.import_default_modules()
        dispatcher = self.dispatcher()
        total = 0
        try:
            while count := dispatcher.run_once():
                total += count
        finally:
            dispatcher.close()
        return total


def is_local(conf: Any) -> bool:
    """Whether the broker is one that needs no server, so that everything runs on one machine."""
    url = os.environ.get("CELERY_BROKER_URL") or conf.get("broker_url") or ""
    return is_embedded(conf) or str(url).startswith(("memory:", "filesystem:", "sqla+sqlite:"))
