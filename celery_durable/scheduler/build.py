"""Putting a scheduler together."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery_durable.dispatch import Dispatcher
from celery_durable.publisher import Publisher
from celery_durable.scheduler.deferral import NOTED, SOON, Deferral
from celery_durable.scheduler.plan import Plan
from celery_durable.scheduler.state import HealthFile
from celery_durable.scheduler.ticker import Ticker


def build_ticker(
    durable: Any, deferral: Deferral, *, scheduler: Any = None, health: HealthFile | None = None
) -> Ticker:
    """The ticker of this process. ``scheduler``: the Celery scheduler whose entries it is to run."""
    dispatcher = Dispatcher(
        durable.app,
        durable.runtime,
        durable.crash_limits,
        publisher=Publisher(durable.app, is_stopping=deferral.is_pending),
        taking=partial(deferral.holding, SOON),
        sending=partial(deferral.holding, NOTED),
    )
    plan = None if scheduler is None else Plan(scheduler, durable.store.schedule)
    return Ticker(durable, dispatcher, plan=plan, health=health)
