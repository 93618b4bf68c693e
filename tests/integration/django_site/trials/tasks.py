"""Tasks of an app that knows no Celery app of its own."""

from __future__ import annotations

import time

from celery import shared_task
from celery.contrib.django.task import DjangoTask
from django.db import transaction

from celery_durable import DurableTask, NotDurable, current_lease, sleep, step
from tests.integration.django_site.trials.models import Trial


class OnCommitTask(DurableTask, DjangoTask):
    """A durable task with ``delay_on_commit``."""

    abstract = True


def start(name: str) -> int:
    with transaction.atomic():
        return int(Trial.objects.create(name=name).pk)


def end(pk: int) -> str:
    trial = Trial.objects.get(pk=pk)
    trial.name += ", converted"
    trial.save()
    return trial.name


@shared_task(base=OnCommitTask)
def onboard(name: str, seconds: float) -> str:
    pk = step(start, name)
    sleep(seconds)
    return str(step(end, pk))


@shared_task(base=DurableTask)
def sleep_in_a_block(name: str, catches: bool) -> None:
    with transaction.atomic():
        Trial.objects.create(name=name)
        try:
            sleep(600)
        except NotDurable:
            if not catches:
                raise
        raise ValueError("rolled back")


@shared_task(base=DurableTask)
def work_in_a_block(name: str, seconds: float) -> int:
    """A transaction that is open for longer than a lease lives without renewal."""
    with transaction.atomic():
        Trial.objects.create(name=name)
        time.sleep(seconds)
        return current_lease().token


@shared_task
def order(name: str, fails: bool) -> None:
    """Something else that is to start if and only if the block commits."""
    with transaction.atomic():
        Trial.objects.create(name=name)
        onboard.delay_on_commit(f"{name}, later", 0)
        if fails:
            raise ValueError("rolled back")
