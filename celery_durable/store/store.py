"""The store of one namespace: its statements by concern, over one database."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import select

from celery_durable.store import upgrade
from celery_durable.store.base import Context
from celery_durable.store.claims import Claims
from celery_durable.store.due import DueRows
from celery_durable.store.engine import BUSY_TIMEOUT, Database
from celery_durable.store.leases import Leases
from celery_durable.store.notify import Hints, Notifier, channel_name, hints_for
from celery_durable.store.outbox import Outbox
from celery_durable.store.queries import Queries
from celery_durable.store.runs import Runs
from celery_durable.store.schedule import ScheduleRows
from celery_durable.store.schema import schema_for
from celery_durable.store.sqlite import HeartbeatTurns
from celery_durable.store.statistics import Statistics
from celery_durable.store.verdicts import Verdicts


class Store:
    """What is kept, and the only way to it.

    Arguments:
        url: SQLAlchemy URL of PostgreSQL (psycopg 3) or SQLite.
        namespace: every statement is about the rows of this one only.
        heartbeat_timeout: seconds that a renewal may take at most; it has a connection of its own, so
            that tasks that use all others cannot hold it up.
        notify_within: seconds; what is written to be due sooner wakes the schedulers where the database
            can. None: never.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        prefix: str = "durable_",
        schema: str | None = None,
        engine_options: Mapping[str, Any] | None = None,
        heartbeat_timeout: float = 5.0,
        notify_within: float | None = None,
    ) -> None:
        self.database = Database(url, engine_options)
        self.time_offset = [0.0]
        self.stopped_at: list[datetime] = []
        tables = schema_for(prefix, schema)
        self._channel = channel_name(tables, namespace)
        self._notifies = notify_within is not None
        notifier = None
        if notify_within is not None:
            notifier = Notifier(self.database, self._channel, notify_within)
        context = Context(self.database, tables, namespace, self.time_offset, notifier, self.stopped_at)
        self.context = context
        self.claims = Claims(context)
        self.runs = Runs(context, self.claims)
        self.leases = Leases(context)
        self.due = DueRows(context)
        self.outbox = Outbox(context, self.claims)
        self.verdicts = Verdicts(context)
        self.queries = Queries(context)
        self.statistics = Statistics(context)
        self.schedule = ScheduleRows(context, self.claims)
        self._heartbeat_database = self._second_database(url, engine_options, heartbeat_timeout)
        self.heartbeats = Leases(
            Context(
                self._heartbeat_database,
                context.schema,
                namespace,
                self.time_offset,
                stopped_at=self.stopped_at,
            )
        )

    def _second_database(
        self, url: str, engine_options: Mapping[str, Any] | None, timeout: float
    ) -> Database:
        if self.database.is_in_memory:
            return self.database
        options = dict(engine_options or {})
        if "poolclass" not in options:
            options |= {"pool_size": 1, "max_overflow": 0}
        return Database(
            url,
            options,
            # One turn for all leases of a process: to give up sooner would help none of them. But a fork
            # waits for who waits here.
            busy_timeout=min(timeout, BUSY_TIMEOUT),
            statement_timeout=timeout,
            turn_taker=HeartbeatTurns,
        )

    def hints(self) -> Hints:
        """How a scheduler waits for what is due next."""
        return hints_for(self.database, self._channel, notify=self._notifies)

    def now(self) -> Any:
        """The database's time."""
        with self.database.statements() as connection:
            return connection.execute(select(self.context.now())).scalar_one()

    def upgrade(self) -> None:
        """Create or migrate the tables."""
        upgrade.upgrade(self.context)

    def check(self) -> None:
        """Raise ConfigurationError where the tables are not those of this release."""
        upgrade.check(self.context)

    def dispose(self) -> None:
        """Close this process's connections."""
        self.database.dispose()
        self._heartbeat_database.dispose()
