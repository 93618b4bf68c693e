"""``app.control`` of a durable app."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_durable import Durable
from celery_durable.errors import StoreUnavailable


@pytest.fixture
def app(tmp_path):
    app = Celery("proj", broker="memory://", backend="cache+memory://", set_as_current=False)
    Durable(app, database_url=f"sqlite:///{tmp_path}/no/such/folder/durable.db")
    return app


@pytest.fixture
def told(app, monkeypatch):
    """What the workers are told: (command, arguments)."""
    told = []
    monkeypatch.setattr(
        app.control, "broadcast", lambda command, arguments=None, **_: told.append((command, arguments))
    )
    return told


def test_a_revoke_without_the_database_reaches_the_workers_and_is_to_be_repeated(app, told):
    with pytest.raises(StoreUnavailable, match="were told, and may forget: revoke it again"):
        app.control.revoke("some-task")

    assert [(command, arguments["task_id"]) for command, arguments in told] == [("revoke", "some-task")]


def test_what_no_row_can_be_called_is_for_the_workers_alone(app, told):
    app.control.revoke("nul\x00byte")

    assert [command for command, _ in told] == ["revoke"]
