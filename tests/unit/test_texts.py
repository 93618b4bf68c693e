"""Ids and names that no row can hold: one clear answer for each who comes with one, before the database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_durable import Durable, DurableTask, ExecutionNotFound, sleep
from celery_durable.beat import DurableScheduler
from celery_durable.cli import durable as durable_command
from celery_durable.errors import ConfigurationError
from celery_durable.operations import Changed
from celery_durable.texts import flaw_of_id, flaw_of_text

LONG, NUL, HALF = "x" * 256, "a\x00b", "a\udcffb"
BAD_IDS = pytest.mark.parametrize("bad", [LONG, NUL, HALF], ids=["long", "nul", "surrogate"])


@pytest.fixture
def durable() -> Iterator[Durable]:
    app = Celery("proj", broker="memory://", backend="cache+memory://", set_as_current=False)
    durable = Durable(app, database_url="sqlite://")
    durable.upgrade()
    yield durable
    durable.store.dispose()
    app.close()


@pytest.fixture
def task(durable: Durable) -> Any:
    @durable.app.task(base=DurableTask, name="proj.task", shared=False)
    def task() -> None:
        """Nothing."""

    return task


@pytest.mark.parametrize("good", ["x" * 255, "ä€😀", "with space", "0"])
def test_a_row_can_have_any_other_id(good: str) -> None:
    assert flaw_of_id(good) is None


def test_a_name_may_be_of_any_length() -> None:
    assert flaw_of_text("x" * 10_000) is None
    assert "int" in (flaw_of_text(5) or "")


@BAD_IDS
class TestIds:
    @pytest.mark.parametrize("options", [{}, {"countdown": 60}])
    def test_a_producer_is_told_and_nothing_is_sent(
        self, durable: Durable, task: Any, bad: str, options: dict[str, Any]
    ) -> None:
        with pytest.raises(ValueError, match="task id"):
            task.apply_async(task_id=bad, **options)
        with pytest.raises(ValueError, match="task id"):
            durable.app.send_task("proj.task", task_id=bad, **options)
        with pytest.raises(ValueError, match="task id"):
            chain(task.si().set(task_id=bad), task.si())()
        assert durable.count() == 0

    def test_an_operator_finds_nothing(self, durable: Durable, bad: str) -> None:
        for ask in (durable.get, durable.cancel, durable.wake, durable.release):
            with pytest.raises(ExecutionNotFound):
                ask(bad)
        with pytest.raises(ExecutionNotFound):
            durable.postpone(bad, by=60)

    def test_of_several_the_others_are_changed(self, durable: Durable, task: Any, bad: str) -> None:
        good = task.apply_async(countdown=600).id
        assert durable.cancel([good, bad]) == Changed((good,), (bad,))

    def test_a_revoke_is_none_of_a_durable_task(self, durable: Durable, bad: str) -> None:
        durable.app.control.revoke([bad, "good"])
        assert [found.task_id for found in durable.list()] == ["good"]

    @pytest.mark.parametrize("command", ["show", "wake", "cancel"])
    def test_the_command_line_finds_nothing(self, durable: Durable, bad: str, command: str) -> None:
        context = CLIContext(app=durable.app, no_color=True, workdir=None)
        done = CliRunner().invoke(durable_command, [command, bad], obj=context)
        assert (done.exit_code, isinstance(done.exception, SystemExit)) == (1, True)
        assert "There is no durable execution" in done.output

    def test_the_name_of_a_beat_entry_is_refused_when_beat_starts(self, durable: Durable, bad: str) -> None:
        durable.app.conf.beat_schedule = {bad: {"task": "proj.task", "schedule": 10.0}}
        with pytest.raises(ConfigurationError, match="beat_schedule"):
            DurableScheduler(app=durable.app)


@pytest.mark.parametrize("bad", [NUL, HALF], ids=["nul", "surrogate"])
class TestNames:
    def test_of_a_task(self, durable: Durable, bad: str) -> None:
        @durable.app.task(base=DurableTask, name=bad, shared=False)
        def task() -> None:
            """Nothing."""

        for options in ({}, {"countdown": 60}):
            with pytest.raises(ValueError, match="task name"):
                task.apply_async(**options)

    def test_of_a_sleep(self, bad: str) -> None:
        with pytest.raises(ValueError, match="name"):
            sleep(60, name=bad)

    @pytest.mark.parametrize("option", ["task", "owner", "text"])
    def test_in_a_filter(self, durable: Durable, bad: str, option: str) -> None:
        with pytest.raises(ValueError, match=option):
            durable.count(**{option: bad})  # type: ignore[misc]
        context = CLIContext(app=durable.app, no_color=True, workdir=None)
        done = CliRunner().invoke(durable_command, ["list", f"--{option}", bad], obj=context)
        assert done.exit_code == 2
        assert len(done.output.splitlines()) == 1
