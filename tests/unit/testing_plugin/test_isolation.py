"""A user's own app: its broker, database and result store are out of reach for a test, and back after it."""

from __future__ import annotations

import os

import pytest
from celery import Celery, current_app, shared_task

from celery_durable import ConfigurationError, Durable, DurableTask, sleep, step
from celery_durable.testing import DurableClock
from celery_durable.testing.results import MemoryBackend

BROKER = "amqp://user:secret@broker.invalid//"
DATABASE = "postgresql+psycopg://user@database.invalid/proj"
RESULTS = "redis://results.invalid/0"


@pytest.fixture
def app():
    """As in production, none of it reachable."""
    app = Celery("shop", broker=BROKER, backend=RESULTS, set_as_current=False, namespace="SHOP")
    app.conf.update(
        broker_use_ssl={"ca": "x"},
        durable_engine_options={"pool_recycle": 60},
        durable_schema="tasks",
        task_always_eager=True,
        broker_transport_options={"visibility_timeout": 5},
    )
    Durable(app, database_url=DATABASE, max_crashes=1)

    @app.task(base=DurableTask, name="shop.order", shared=False)
    def order(number):
        step(str, number)
        sleep(days=1)
        return number

    return app


def order_of(app):
    return app.tasks["shop.order"]


def settings_of(app):
    conf, durable = app.conf, app.durable
    return (
        conf.broker_url,
        conf.broker_read_url,
        conf.broker_use_ssl,
        conf.broker_transport_options,
        conf.result_backend,
        conf.task_always_eager,
        durable.settings,
    )


def test_tasks_of_the_app_run_in_memory(app):
    with DurableClock(app) as clock:
        result = order_of(app).delay(7)
        clock.advance(days=1)

        assert result.get() == 7
        assert isinstance(app.backend, MemoryBackend)
        assert app.durable.store.database.is_in_memory
        assert app.durable.settings.max_crashes == 1
        assert app.durable.settings.schema is None


def test_all_is_as_before_after_it(app):
    order, before, store = order_of(app), settings_of(app), app.durable.store
    pool, amqp, control, now = app.pool, app.amqp, app.control, app.now()
    with DurableClock(app) as clock:
        order.delay(7)
        clock.drain()
        assert app.control is not control

    assert settings_of(app) == before
    assert app.durable.store is store
    assert (app.pool, app.amqp, app.control) == (pool, amqp, control)
    assert not isinstance(app.backend, MemoryBackend)
    assert app.now() >= now
    assert order.__trace__ is None
    assert app.durable.worker is None
    assert "broker.invalid" in app.connection_for_write().as_uri()


def test_it_is_as_before_after_a_test_that_fails(app):
    before = settings_of(app)
    with pytest.raises(ZeroDivisionError), DurableClock(app):
        raise ZeroDivisionError
    assert settings_of(app) == before


def test_variables_of_the_environment_do_not_win(app, monkeypatch):
    monkeypatch.setenv("CELERY_BROKER_URL", BROKER)
    monkeypatch.setenv("CELERY_BROKER_WRITE_URL", BROKER)
    monkeypatch.setenv("CELERY_RESULT_BACKEND", RESULTS)
    monkeypatch.setenv("CELERY_DURABLE_DATABASE_URL", DATABASE)
    with DurableClock(app) as clock:
        assert clock.finish(order_of(app).delay(7)) == 7
    assert os.environ["CELERY_DURABLE_DATABASE_URL"] == DATABASE


def test_tests_do_not_see_each_other(app):
    with DurableClock(app) as clock:
        result = order_of(app).delay(7)
        clock.drain()
        assert app.durable.count() == 1
        order_of(app).delay(8)
    with DurableClock(app) as clock:
        assert app.durable.count() == 0
        assert app.AsyncResult(result.id).state == "PENDING"
        assert clock.drain() == 0


def test_two_apps_at_a_time(app):
    other = Celery("other", set_as_current=False)
    Durable(other)
    with DurableClock(app) as clock, DurableClock(other):
        order_of(app).delay(7)
        assert other.durable.count() == 0
        assert clock.drain() == 1


def test_the_app_is_the_current_one_and_shared_tasks_are_its_own(app):
    # Of a name of its own: Celery gives a shared task to every app that this process makes from now on.
    @shared_task(base=DurableTask, name="shop.shared_with_a_test")
    def shared():
        sleep(days=1)
        return current_app.main

    before = current_app._get_current_object()
    with DurableClock(app) as clock:
        assert clock.finish(shared.delay()) == "shop"
    assert current_app._get_current_object() is before


def test_settings_for_a_test(app):
    with DurableClock(app, {"durable_max_crashes": 7, "timezone": "Asia/Tokyo"}) as clock:
        assert app.durable.settings.max_crashes == 7
        assert app.now() == clock.now()
        assert app.now().utcoffset().total_seconds() == 9 * 3600
    assert app.durable.settings.max_crashes == 1


def test_settings_for_a_test_cannot_bring_the_real_database_back(app):
    with DurableClock(app, {"durable_database_url": DATABASE, "broker_url": BROKER}):
        assert app.durable.store.database.is_in_memory


def test_an_app_without_the_extension_is_refused():
    with pytest.raises(ConfigurationError, match=r"app 'bare' is not durable.*durable_celery_app"):
        DurableClock(Celery("bare", set_as_current=False)).__enter__()
