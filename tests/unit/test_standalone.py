"""The scheduler as a process of its own: what it knows when it begins."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_durable import ConfigurationError, Durable, DurableTask
from celery_durable.scheduler import standalone


class Began(Exception):
    """The scheduler has made its preparations."""


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Celery:
    def begin(*_: Any, **__: Any) -> None:
        raise Began

    monkeypatch.setattr(standalone, "build_ticker", begin)
    app = Celery("proj", broker="memory://", set_as_current=False)
    Durable(app, database_url="sqlite://")
    return app


def include(app: Celery, monkeypatch: pytest.MonkeyPatch, max_crashes: int) -> None:
    """Have a task in a module that the app's configuration names, and nobody has imported yet."""

    def import_default_modules() -> None:
        @app.task(base=DurableTask, name="once", max_crashes=max_crashes, shared=False)
        def once() -> None:
            """Nothing."""

    monkeypatch.setattr(app.loader, "import_default_modules", import_default_modules)


def test_it_counts_crashes_by_the_limits_of_the_tasks_themselves(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    include(app, monkeypatch, 0)
    with pytest.raises(Began):
        standalone.run_scheduler(app)
    assert app.durable.crash_limits("once")[0] == 0


def test_a_wrong_option_of_a_task_stops_it_there(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    include(app, monkeypatch, -1)
    with pytest.raises(ConfigurationError, match="max_crashes"):
        standalone.run_scheduler(app)
