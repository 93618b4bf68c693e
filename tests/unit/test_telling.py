"""Whether an outcome counts as told, and what follows when the result store will not take it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Reject

from celery_durable import DurableTask
from celery_durable.telling import TellingBackend
from celery_durable.testing import DurableClock
from celery_durable.testing.app import durable_app


class ResultStore:
    """A backend that notes what it was told of, and may be away."""

    def __init__(self) -> None:
        self.is_away = False
        self.heard: list[str] = []

    def mark_as_done(self, task_id: str, result: Any = None, **_: Any) -> None:
        if self.is_away:
            raise ConnectionError("away")
        self.heard.append(task_id)

    mark_as_failure = mark_as_done


@pytest.fixture
def store() -> ResultStore:
    return ResultStore()


@pytest.fixture
def run() -> Any:
    return SimpleNamespace(told=False, lease=SimpleNamespace(task_id="own"))


@pytest.mark.parametrize("mark", ["mark_as_done", "mark_as_failure"])
def test_only_what_is_told_of_its_own_id_is_told(store: ResultStore, run: Any, mark: str) -> None:
    """A body may call ``apply`` of its own task, which has Celery tell of another id."""
    tell = getattr(TellingBackend(store, run), mark)
    tell("another", 1)
    assert (store.heard, run.told) == (["another"], False)
    tell("own", 2)
    assert (store.heard, run.told) == (["another", "own"], True)


def test_what_the_store_does_not_take_of_its_own_id_leaves_the_tracer(store: ResultStore, run: Any) -> None:
    store.is_away = True
    with pytest.raises(Reject):
        TellingBackend(store, run).mark_as_done(task_id="own", result=2)
    assert not run.told


def test_what_the_store_does_not_take_of_another_id_is_for_celery_to_answer(
    store: ResultStore, run: Any
) -> None:
    """A Reject would end the caller's body as if that had raised it."""
    store.is_away = True
    with pytest.raises(ConnectionError):
        TellingBackend(store, run).mark_as_done("another", 2)


def test_an_outcome_that_the_store_never_takes_is_told_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a value that is longer than the store allows."""
    app = durable_app()
    runs, tries = [], []

    @app.task(base=DurableTask, name="proj.long")
    def long() -> str:
        runs.append(1)
        return "long"

    with DurableClock(app) as clock:
        store = app.backend._set_with_state

        def refuse(key: Any, value: Any, state: str) -> Any:
            if not is_wide:
                tries.append(clock.now())
                raise ValueError("too long for column 'result'")
            return store(key, value, state)

        monkeypatch.setattr(app.backend, "_set_with_state", refuse)
        is_wide = False
        result = long.delay()
        clock.advance(300)
        pauses = [round((late - early).total_seconds()) for early, late in itertools.pairwise(tries)]
        assert pauses[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
        said = [record for record in caplog.records if record.levelname == "ERROR"]
        assert len(said) == len(tries)
        assert "could not be told (2 times): ValueError" in said[1].getMessage()
        is_wide = True
        clock.advance(60)
        assert (result.get(timeout=0), len(runs)) == ("long", 1)
        assert app.durable.get(result.id).status == "succeeded"
