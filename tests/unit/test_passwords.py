"""No part of a password is in a log line, an error or the answer of a command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_durable import Durable
from celery_durable.cli import durable as durable_command
from celery_durable.publisher import Publisher

NOBODY = "127.0.0.1:1"


@pytest.fixture(
    params=[
        f"redis://me:hunter2@{NOBODY}/0",
        f"redis://:hunter2/x@{NOBODY}/0",
        f"redis://me:x@hunter2@{NOBODY}/0",
        f"amqp://me:hunter2@{NOBODY}//",
        f"amqp://me:hunter2/x@{NOBODY}//",
    ]
)
def app(request: pytest.FixtureRequest) -> Iterator[Celery]:
    """An app whose broker is not there, or has a password that is not written as it must be."""
    app = Celery("proj", broker=request.param, backend="cache+memory://", set_as_current=False)
    options: Any = {"connect_args": {"timeout": 5}}
    Durable(app, database_url="sqlite://", engine_options=options).upgrade()
    yield app
    app.durable.store.dispose()
    app.close()


def test_of_a_broker_that_cannot_be_reached(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    assert not Publisher(app).connect()
    assert "The broker cannot be reached" in caplog.text
    assert "hunter2" not in caplog.text
    context = CLIContext(app=app, no_color=True, workdir=None)
    for options in ([], ["--json"]):
        done = CliRunner().invoke(durable_command, ["check", *options], obj=context)
        assert "broker" in done.output
        assert "hunter2" not in done.output


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:hunter2@{NOBODY}/db",
        f"postgresql://me:x@hunter2@{NOBODY}/db",
        f"postgresql://{NOBODY}/db?user=me&password=hunter2",
    ],
)
def test_of_a_database_that_cannot_be_reached(url: str, caplog: pytest.LogCaptureFixture) -> None:
    app = Celery("proj", broker="memory://", set_as_current=False)
    durable = Durable(app, database_url=url)
    assert "hunter2" not in repr(durable.settings) + str(durable.settings)
    context = CLIContext(app=app, no_color=True, workdir=None)
    for command in (["check"], ["list"], ["stats", "--json"]):
        done = CliRunner().invoke(durable_command, command, obj=context)
        assert done.exit_code != 0
        assert "hunter2" not in done.output + repr(done.exception)
    with pytest.raises(Exception, match="database") as caught:
        durable.list(limit=1).__iter__().__next__()
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in f"{error} {error!r}"
        error = error.__cause__ or error.__context__
    assert "hunter2" not in caplog.text
    app.close()
