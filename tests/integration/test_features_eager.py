"""Eager tasks, and direct calls: no database, no broker, nothing written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from celery_durable import (
    Durable,
    DurableTask,
    NotDurable,
    StepLimitExceeded,
    current_lease,
    sleep,
    sleep_until,
    step,
)


class Project:
    """An app that knows no server, and what its tasks did."""

    def __init__(self) -> None:
        self.app = app = Celery("eager", set_as_current=False)
        Durable(app)
        self.done: list[str] = []

        @app.task(base=DurableTask, bind=True, shared=False)
        def nap(task: Any, value: Any = 1) -> Any:
            before = step(self.did, f"before {value}", (value, 2))
            task.sleep(hours=1)
            sleep_until(task.app.now())
            return [value, before, step(self.did, f"after {value}", current_lease().token)]

        @app.task(base=DurableTask, bind=True, max_retries=2, shared=False)
        def tries(task: Any, wins: bool) -> int:
            step(self.did, f"try {task.request.retries}")
            sleep(3600)
            if wins and task.request.retries:
                return int(task.request.retries)
            raise task.retry(countdown=3600, exc=KeyError("again"))

        @app.task(base=DurableTask, shared=False)
        def fails() -> None:
            sleep(3600)
            raise ValueError("after the sleep")

        @app.task(base=DurableTask, bind=True, shared=False)
        def replaces(task: Any) -> Any:
            sleep(3600)
            return task.replace(nap.s(9))

        @app.task(shared=False)
        def plain(*values: Any) -> Any:
            return self.did(f"plain {values}", values[0])

        @app.task(shared=False)
        def errback(request: Any, exc: Any, traceback: Any) -> None:
            self.did(f"errback {exc!r}")

        self.nap, self.tries, self.fails, self.replaces = nap, tries, fails, replaces
        self.plain, self.errback = plain, errback

    def did(self, what: str, value: Any = None) -> Any:
        self.done.append(what)
        return value


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """The project, in an empty folder; afterwards the folder is empty, and no thread is left."""
    monkeypatch.chdir(tmp_path)
    for name in ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "CELERY_DURABLE_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    threads = set(threading.enumerate())
    project = Project()
    yield project
    project.app.close()
    assert list(tmp_path.iterdir()) == []
    assert set(threading.enumerate()) <= threads


#: A step's value is what a replay would give: decoded from JSON.
NAP = [1, [1, 2], 0]


@pytest.fixture(params=[True, False], ids=["propagates", "keeps"])
def eager(request: pytest.FixtureRequest, project: Project) -> Project:
    """The project with ``task_always_eager``, with either way to treat an exception."""
    project.app.conf.update(task_always_eager=True, task_eager_propagates=request.param)
    return project


class TestAlwaysEager:
    @pytest.mark.report("eager")
    def test_sleeps_return_at_once_and_steps_run(self, eager: Project) -> None:
        assert eager.nap.delay().get() == NAP
        assert eager.done == ["before 1", "after 1"]

    def test_a_countdown_is_no_wait(self, eager: Project) -> None:
        assert eager.nap.apply_async(countdown=3600, expires=1).get() == NAP

    def test_a_failure(self, eager: Project) -> None:
        if eager.app.conf.task_eager_propagates:
            with pytest.raises(ValueError, match="after the sleep"):
                eager.fails.delay()
        else:
            result = eager.fails.apply_async(link_error=eager.errback.s())
            assert result.state == "FAILURE"
            with pytest.raises(ValueError, match="after the sleep"):
                result.get()
            assert eager.done == ["errback ValueError('after the sleep')"]

    def test_a_retry(self, eager: Project) -> None:
        if eager.app.conf.task_eager_propagates:
            # Celery's own eager retry propagates an exception of its own kind here.
            eager.app.conf.task_eager_propagates = False
        assert eager.tries.delay(True).get() == 1
        assert eager.done == ["try 0", "try 1"]
        assert isinstance(eager.tries.delay(False).result, KeyError)
        assert eager.done[2:] == ["try 0", "try 1", "try 2"]

    @pytest.mark.report("eager")
    def test_a_chain_and_callbacks_go_on_once(self, eager: Project) -> None:
        result = chain(eager.plain.s(5), eager.nap.s(), eager.plain.s()).apply_async()
        assert result.get() == [5, [5, 2], 0]
        eager.done.clear()
        eager.nap.apply_async(link=eager.plain.s())
        assert eager.done == ["before 1", "after 1", f"plain ({NAP},)"]

    def test_a_group_and_a_chord(self, eager: Project) -> None:
        assert group(eager.nap.s(1), eager.plain.s(2)).apply_async().get() == [NAP, 2]
        assert chord([eager.nap.s(1), eager.plain.s(2)])(eager.plain.s()).get() == [NAP, 2]

    def test_a_replacement(self, eager: Project) -> None:
        assert eager.replaces.delay().get() == [9, [9, 2], 0]


class TestApply:
    def test_it_runs_here_and_now(self, project: Project) -> None:
        assert project.nap.apply((4,)).get() == [4, [4, 2], 0]
        assert project.nap.s(4).apply().get() == [4, [4, 2], 0]

    def test_a_failure_is_kept_or_thrown(self, project: Project) -> None:
        assert isinstance(project.fails.apply().result, ValueError)
        with pytest.raises(ValueError, match="after the sleep"):
            project.fails.apply(throw=True)

    def test_the_lease_never_ends(self, project: Project) -> None:
        seen: list[Any] = []

        @project.app.task(shared=False, base=DurableTask, bind=True)
        def looks(task: Any) -> None:
            lease = current_lease()
            lease.check()
            seen.extend([lease.token, lease.lost, lease.task_id == task.request.id, lease.remaining])

        looks.apply()
        assert seen == [0, False, True, float("inf")]

    def test_mistakes_are_mistakes_here_too(self, project: Project) -> None:
        @project.app.task(shared=False, base=DurableTask)
        def naps_in_a_step() -> None:
            step(sleep, 1)

        @project.app.task(shared=False, base=DurableTask)
        def naps_for_a_word() -> None:
            sleep("long")  # type: ignore[arg-type]

        @project.app.task(shared=False, base=DurableTask)
        def never_ends() -> None:
            while True:
                sleep(1)

        project.app.conf.durable_step_limit = 50
        assert isinstance(naps_in_a_step.apply().result, NotDurable)
        assert isinstance(naps_for_a_word.apply().result, TypeError)
        assert isinstance(never_ends.apply().result, StepLimitExceeded)


class TestDirectCalls:
    @pytest.mark.report("eager")
    def test_nothing_in_them_is_durable(self, project: Project) -> None:
        with pytest.raises(NotDurable, match=r"\.apply\(\)") as caught:
            project.nap(1)
        assert "pytest" in str(caught.value)
        with pytest.raises(NotDurable):
            project.fails()

    def test_nor_in_map_starmap_and_chunks(self, project: Project) -> None:
        for canvas in (project.nap.map([1, 2]), project.nap.starmap([(1,), (2,)])):
            assert isinstance(canvas.apply().result, NotDurable)
        chunks = project.nap.chunks([(1,), (2,)], 1).group()
        assert all(isinstance(result.result, NotDurable) for result in chunks.apply().results)

    def test_nor_in_a_direct_call_from_a_durable_body(self, project: Project) -> None:
        @project.app.task(shared=False, base=DurableTask)
        def outer() -> None:
            sleep(1)
            project.nap(1)

        assert isinstance(outer.apply().result, NotDurable)
