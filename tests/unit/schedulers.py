"""Schedulers of an app whose broker and database are in this process's memory."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from celery import Celery
from sqlalchemy import select

from celery_durable import Durable, DurableTask
from celery_durable.beat import DurableScheduler
from celery_durable.records import Status
from celery_durable.scheduler.plan import Plan
from tests.unit.fakes import StillClock


class World:
    """An app, its database, and schedulers of it; time passes for all of them together."""

    def __init__(self, **settings: Any) -> None:
        self.clock = StillClock()
        self.app = Celery("world", broker="memory://", set_as_current=False)
        self.app.conf.result_backend = "cache+memory://"
        self.app.conf.update(settings)
        self.durable = Durable(self.app, database_url="sqlite:///:memory:")
        self.ran: list[Any] = []

        @self.app.task(name="plain", shared=False)
        def plain(*args: Any, **_: Any) -> None:
            self.ran.append(args)

        @self.app.task(name="durable", base=DurableTask, shared=False)
        def durable(*args: Any, **_: Any) -> None:
            self.ran.append(args)

        self.store = self.durable.store
        self.store.upgrade()
        # The memory transport is one for the whole process: other tests may have left messages there.
        self.app.control.purge()

    def schedule(self, **entries: dict[str, Any]) -> None:
        """The beat schedule of the schedulers that are started from now on."""
        self.app.conf.beat_schedule = {
            name: {"task": "plain", "schedule": 10.0, **entry} for name, entry in entries.items()
        }

    def start(self, kind: type[DurableScheduler] = DurableScheduler) -> Beat:
        """One more scheduler, which has seen its entries."""
        scheduler = kind(app=self.app)
        beat = Beat(self, scheduler)
        beat.run()
        return beat

    def travel(self, seconds: float) -> None:
        """Let time pass."""
        self.store.time_offset[0] += seconds
        self.clock.now += seconds

    def sent(self) -> list[tuple[str, str]]:
        """The messages that wait to be sent: status and task, the oldest first."""
        executions = self.store.context.schema.executions
        with self.store.database.statements() as connection:
            rows = connection.execute(
                select(executions.c.status, executions.c.task_name).order_by(executions.c.created_at)
            )
            return [(row.status, row.task_name) for row in rows]

    def plain_messages(self) -> list[Any]:
        """The rows of plain messages that wait to be sent."""
        executions = self.store.context.schema.executions
        with self.store.database.statements() as connection:
            return list(connection.execute(select(executions).where(executions.c.status == Status.OUTBOX)))


class Beat:
    """One scheduler, and a hand that makes it look for what is due."""

    def __init__(self, world: World, scheduler: Any) -> None:
        self.world = world
        self.scheduler = scheduler
        self.plan = Plan(scheduler, world.store.schedule, world.clock)

    def run(self) -> int:
        """Run what is due; how many messages that made."""
        now: datetime = self.world.store.now()
        return self.plan.run_due(now)

    @property
    def due_in(self) -> float | None:
        return self.plan.due_in()
