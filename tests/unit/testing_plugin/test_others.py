"""Apps that a test does not drive: what they send would go to a real broker, so it is refused."""

from __future__ import annotations

import re

import pytest
from celery import Celery, chain, chord, group

from celery_durable import ConfigurationError, Durable, DurableTask
from celery_durable.testing import DurableClock


def new_app(name="proj"):
    """As in production, none of it reachable."""
    app = Celery(name, broker="amqp://broker.invalid//", backend="cache+memory://", set_as_current=False)
    Durable(app, database_url="postgresql+psycopg://user@database.invalid/proj")

    @app.task(base=DurableTask, name="proj.onboard", shared=False)
    def onboard(user_id):
        return user_id

    @app.task(name="proj.mail", shared=False)
    def mail(user_id):
        return user_id

    return app


@pytest.fixture(scope="module")
def proj():
    return new_app()


@pytest.fixture(scope="module")
def onboard(proj):
    return proj.tasks["proj.onboard"]


@pytest.fixture(scope="module")
def mail(proj):
    return proj.tasks["proj.mail"]


def test_the_error_names_the_task_both_apps_and_the_remedy(durable_clock, onboard):
    message = (
        "task proj.onboard belongs to the app 'proj', but durable_clock drives another one, 'durable-tests':"
        " define the fixture durable_celery_app so that it returns the app of the task"
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        onboard.delay(7)


def test_no_way_of_sending_gets_through(durable_app, proj, onboard, mail):
    ways = {
        "plain": lambda: mail.delay(7),
        "at a time": lambda: onboard.apply_async((7,), countdown=60),
        "plain at a time": lambda: mail.apply_async((7,), countdown=60),
        "by name": lambda: proj.send_task("billing.charge"),
        "chain": chain(onboard.s(7), mail.s()).delay,
        "group": group(onboard.s(7), mail.s(8)).delay,
        "chord": chord([onboard.s(7)], mail.s()).delay,
    }
    for send in ways.values():
        with pytest.raises(ConfigurationError, match="belongs to the app 'proj'"):
            send()


def test_an_app_that_is_made_in_the_test_is_another_one_too_even_of_the_same_name(proj):
    with DurableClock(proj) as clock:
        with pytest.raises(
            ConfigurationError, match="app 'proj', but durable_clock drives another one, 'proj'"
        ):
            new_app().tasks["proj.onboard"].delay(7)
        assert clock.finish(proj.tasks["proj.onboard"].delay(7)) == 7


def test_a_task_of_the_test_cannot_send_to_it_either(durable_app, durable_clock, mail):
    @durable_app.task(base=DurableTask, name="parent")
    def parent():
        mail.delay(7)

    with pytest.raises(ConfigurationError, match=r"proj\.mail belongs to the app 'proj'"):
        durable_clock.finish(parent.delay())


def test_an_app_with_eager_tasks_sends_nothing_so_it_may(durable_app):
    eager = new_app()
    eager.conf.task_always_eager = True
    assert eager.tasks["proj.mail"].delay(7).get() == 7


def test_each_of_two_that_are_driven_sends_and_afterwards_all_do(proj, onboard):
    sends = Celery.send_task
    other = new_app("other")
    with DurableClock(other) as outer:
        with DurableClock(proj) as inner:
            assert inner.finish(onboard.delay(7)) == 7
            assert outer.finish(other.tasks["proj.onboard"].delay(8)) == 8
        with pytest.raises(ConfigurationError):
            onboard.delay(7)
    assert Celery.send_task is sends


def test_who_wraps_sends_during_a_test_keeps_his_wrapper_and_it_lets_all_through(proj, monkeypatch):
    # So that it is put back after this test.
    monkeypatch.setattr(Celery, "send_task", Celery.send_task)
    traced = []
    with DurableClock(proj):
        within = Celery.send_task

        def traced_send_task(app, name, *args, **options):
            traced.append(name)
            return within(app, name, *args, **options)

        Celery.send_task = traced_send_task
    app = Celery("later", broker="memory://", set_as_current=False)
    app.send_task("billing.charge")

    assert Celery.send_task is traced_send_task
    assert traced == ["billing.charge"]
