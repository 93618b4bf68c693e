"""django-celery-beat: one-off entries, each due in the past; the scheduler sends them all."""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from typing import Any

import django
from celery import Celery
from django.conf import settings
from django.core.management import call_command
from sqlalchemy.engine import make_url

from benchmarks.marks import mark


def prepare(url: str) -> None:
    _setup(url)
    call_command("migrate", verbosity=0, interactive=False)


def dispatch(url: str, broker: str, queue: str, label: str, count: int) -> None:
    """Make ``count`` entries, tick until nothing is due; the mark's value is how many it sent per second."""
    _setup(url)
    from django_celery_beat.models import ClockedSchedule, PeriodicTask
    from django_celery_beat.schedulers import DatabaseScheduler

    PeriodicTask.objects.all().delete()
    clocked = ClockedSchedule.objects.create(clocked_time=datetime.now(timezone.utc))
    PeriodicTask.objects.bulk_create(
        PeriodicTask(
            name=f"{label}-{number}",
            task="noop",
            clocked=clocked,
            one_off=True,
            queue=queue,
            args=json.dumps([label]),
        )
        for number in range(count)
    )
    app = Celery("bench", broker=broker, set_as_current=True)
    app.conf.task_ignore_result = True
    scheduler: Any = DatabaseScheduler(app=app)
    sent = 0
    apply_async = scheduler.apply_async

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += 1
        return apply_async(*args, **kwargs)

    scheduler.apply_async = counted
    began = time.perf_counter()
    while sent < count:
        scheduler.tick()
    mark(label, sent / (time.perf_counter() - began))


def _setup(url: str) -> None:
    parts = make_url(url)
    settings.configure(
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": parts.database,
                "USER": parts.username,
                "HOST": parts.host,
                "PORT": parts.port,
            }
        },
        INSTALLED_APPS=["django_celery_beat"],
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
    )
    django.setup()
