"""A user's module, as mypy --strict sees it. A line that is wrong ends with the code of its error."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from celery import Celery, shared_task
from typing_extensions import assert_type

from celery_durable import Durable, DurableTask, Lease, current_lease, sleep, sleep_until, step

app = Celery("proj")
durable = Durable(app, lease_ttl=30)


@durable.task
def onboard(user_id: int, trial: bool = False) -> str:
    assert_type(step(len, "abc"), int)
    step(len, 3)  # E: arg-type
    sleep(days=3)
    sleep(timedelta(hours=2), name="trial")
    sleep("3 days")  # E: arg-type
    sleep_until(datetime(2030, 1, 1, tzinfo=timezone.utc))
    sleep_until(3)  # E: arg-type
    assert_type(current_lease(), Lease)
    return "customer"


@durable.task(name="proj.export", lease_ttl=30)
def export(report_id: str) -> int:
    return len(report_id)


@durable.task(bind=True, max_crashes=5)
def bound(self: DurableTask[[int], None], page: int) -> None:
    self.sleep(days=1)
    assert_type(self.step(len, "abc"), int)
    raise self.retry(countdown=5)


@app.task(base=DurableTask)
def by_app(user_id: int) -> str:
    return str(user_id)


@shared_task(base=DurableTask)
def shared(user_id: int) -> str:
    return str(user_id)


def use() -> None:
    assert_type(onboard.delay(7).get(), str)
    assert_type(export.delay("7").get(), int)
    assert_type(onboard(7, trial=True), str)
    onboard.delay("7")  # E: arg-type
    onboard.delay()  # E: call-arg
    onboard.delay(7, days=3)  # E: call-arg
    onboard("7")  # E: arg-type
    export.delay(7)  # E: arg-type
    bound.delay(1)
    bound.delay("1")  # E: arg-type
    onboard.apply_async((7,), countdown=60)
    onboard.si(7)
    onboard.si("7")  # E: arg-type
    by_app.delay(7)
    shared.delay(7)

    execution = durable.get("8d1f7f5c")
    assert_type(execution.due_at, datetime | None)
    assert_type(durable.cancel("8d1f7f5c"), bool)
    durable.postpone("8d1f7f5c", by="1h")  # E: call-overload
    durable.list(state="sleeping")  # E: call-arg


class Base(DurableTask[..., Any]):
    abstract = True
