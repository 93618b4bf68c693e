"""Putting a scheduler together."""

from __future__ import annotations

from typing import Any

from celery_durable.dispatch import Dispatcher
from celery_durable.publisher import Publisher
from celery_durable.scheduler.deferral import Deferral
from celery_durable.scheduler.plan import Plan
from celery_durable.scheduler.state import HealthFile
from celery_durable.scheduler.ticker import Ticker


def build_ticker(durable: Any, *, scheduler: Any = None, health: HealthFile | None = None) -> Ticker:
    """The ticker of this process. ``scheduler``: the Celery scheduler whose entries it is to run."""
    deferral = Deferral()
    dispatcher = Dispatcher(
        durable.app,
        durable.runtime,
        durable.crash_limits,
        publisher=Publisher(durable.app, is_stopping=deferral.is_pending),
        undisturbed=deferral.undisturbed,
    )
    plan = None if scheduler is None else Plan(scheduler, durable.store.schedule)
    return Ticker(durable, dispatcher, plan=plan, health=health)
