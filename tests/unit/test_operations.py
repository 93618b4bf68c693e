"""What operators do in Python, and the control that lasts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.app.control import Control
from celery.backends.cache import _DUMMY_CLIENT_CACHE
from celery.result import GroupResult

from celery_durable import Durable, DurableTask, ExecutionNotFound
from celery_durable.control import DurableControl
from celery_durable.errors import OperationRefused
from celery_durable.operations import PRUNE_BATCH, Changed
from celery_durable.records import Claim, Outcome, OutcomeKind, Status
from tests.store.messages import delivery, schedule

HOUR = timedelta(hours=1)


@pytest.fixture
def durable() -> Iterator[Durable]:
    # One cache for all apps of a process: what an earlier test has left in it is none of this one's.
    _DUMMY_CLIENT_CACHE.clear()
    app = Celery("proj", broker="memory://", backend="cache+memory://", set_as_current=False)
    durable = Durable(app, database_url="sqlite://")
    durable.upgrade()
    yield durable
    durable.store.dispose()
    app.close()


@pytest.fixture
def ids(durable: Durable) -> list[str]:
    ids = ["one", "two", "three"]
    schedule(durable.store, *ids, due_in=3600)
    return ids


def end(durable: Durable, task_id: str) -> None:
    claim = durable.store.claims.claim(delivery(task_id), "owner", 60.0, 3)
    assert isinstance(claim, Claim)
    assert durable.store.runs.end(claim.key, Outcome(OutcomeKind.VALUE), 60.0) is not None
    assert durable.store.runs.finish(claim.key, Status.SUCCEEDED)


class TestLooking:
    def test_one(self, durable: Durable, ids: list[str]) -> None:
        assert durable.get("one").task_id == "one"
        with pytest.raises(ExecutionNotFound):
            durable.get("nope")

    def test_many_are_read_as_they_are_asked_for(self, durable: Durable, ids: list[str]) -> None:
        found = durable.list(status=("scheduled", "sleeping"), text="TW")
        assert next(found).task_id == "two"
        assert next(found, None) is None
        assert durable.count(task="proj.tasks.onboard") == 3

    @pytest.mark.parametrize("wrong", [{"status": "asleep"}, {"limit": -1}, {"offset": -1}])
    def test_a_wrong_value_is_named_at_once(self, durable: Durable, wrong: Any) -> None:
        with pytest.raises(ValueError, match=re.escape(str(next(iter(wrong.values()))))):
            durable.list(**wrong)

    def test_a_wrong_keyword_is_named_at_once(self, durable: Durable) -> None:
        with pytest.raises(TypeError, match="state"):
            durable.list(state="sleeping")  # type: ignore[call-arg]

    def test_a_naive_time_is_one_of_the_app(self, durable: Durable) -> None:
        durable.app.conf.timezone = "America/New_York"
        chosen = durable.filter(due_before=datetime(2026, 1, 1, 12), due_after=datetime(2026, 7, 1, 12))
        assert chosen.due_before == datetime(2026, 1, 1, 17, tzinfo=timezone.utc)
        assert chosen.due_after == datetime(2026, 7, 1, 16, tzinfo=timezone.utc)


class TestOne:
    def test_a_move_answers_with_the_new_time(self, durable: Durable, ids: list[str]) -> None:
        before = durable.get("one").wake_at
        assert before is not None
        assert durable.postpone("one", by=HOUR) == before + HOUR
        assert durable.postpone("one", by=-3600) == before
        assert durable.postpone("one", until=before + 2 * HOUR) == before + 2 * HOUR
        assert durable.wake("one") < before

    def test_a_cancel_answers_whether_it_was_accepted(self, durable: Durable, ids: list[str]) -> None:
        assert durable.cancel("one") is True
        assert durable.cancel("one") is False
        assert durable.app.AsyncResult("one").state == "REVOKED"

    def test_what_cannot_be_is_refused(self, durable: Durable) -> None:
        end(durable, "ended")
        for refused in (durable.wake, durable.release, lambda i: durable.postpone(i, by=1)):
            with pytest.raises(OperationRefused, match="succeeded"):
                refused("ended")
            with pytest.raises(ExecutionNotFound):
                refused("nope")

    @pytest.mark.parametrize("options", [{}, {"by": 1, "until": datetime(2026, 1, 1)}])
    def test_a_time_or_a_span_must_be_said(self, durable: Durable, ids: list[str], options: Any) -> None:
        with pytest.raises(TypeError, match="until or by"):
            durable.postpone("one", **options)

    @pytest.mark.parametrize("by", [float("nan"), float("inf"), timedelta.max, timedelta.min])
    def test_no_span_without_an_end(self, durable: Durable, ids: list[str], by: Any) -> None:
        with pytest.raises(ValueError, match="duration"):
            durable.postpone("one", by=by)

    @pytest.mark.parametrize("by", [True, "1h"])
    def test_no_span_that_is_none(self, durable: Durable, ids: list[str], by: Any) -> None:
        with pytest.raises(TypeError, match="duration"):
            durable.postpone("one", by=by)


class TestMany:
    def test_some_ids(self, durable: Durable, ids: list[str]) -> None:
        end(durable, "ended")
        assert durable.wake(["one", "ended", "one", "nope"]) == Changed(("one",), ("ended", "nope"))
        assert durable.cancel(i for i in ("two", "ended")) == Changed(("two",), ("ended",))
        assert durable.release([]) == Changed(())

    def test_a_filter(self, durable: Durable, ids: list[str]) -> None:
        end(durable, "ended")
        assert durable.postpone(status="live", by=HOUR) == Changed(("one", "two", "three"))
        assert len(durable.cancel(text="TW")) == 1
        assert durable.release(status="quarantined") == Changed(())

    def test_neither_is_a_mistake_and_not_everything(self, durable: Durable, ids: list[str]) -> None:
        with pytest.raises(TypeError, match="filter"):
            durable.cancel()
        with pytest.raises(TypeError, match="not both"):
            durable.cancel("one", status="live")  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="filter"):
            durable.cancel(task=None, status=None)  # type: ignore[call-overload]
        for empty in ({"status": []}, {"text": ""}, {"owner": ""}, {"task": ""}):
            with pytest.raises(ValueError, match="must not be empty"):
                durable.wake(**empty)  # type: ignore[call-overload]
        assert durable.stats().counts == {"scheduled": 3}

    def test_prune_goes_on_until_nothing_old_is_left(
        self, durable: Durable, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("celery_durable.operations.PRUNE_BATCH", 2)
        assert PRUNE_BATCH > 2
        for task_id in ("one", "two", "three"):
            end(durable, task_id)
        assert durable.prune() == 0
        assert durable.prune(older_than=timedelta(0)) == 3


class TestRevoke:
    @pytest.fixture(autouse=True)
    def broadcasts(self, durable: Durable, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        sent: list[Any] = []

        def broadcast(_: Control, command: str, arguments: Any = None, **__: Any) -> None:
            revoked = {
                e.task_id for e in durable.list() if durable.app.AsyncResult(e.task_id).state == "REVOKED"
            }
            sent.append((command, arguments["task_id"], revoked))

        monkeypatch.setattr(Control, "broadcast", broadcast)
        return sent

    def test_the_verdict_and_the_result_come_before_the_broadcast(
        self, durable: Durable, ids: list[str], broadcasts: list[Any]
    ) -> None:
        durable.app.AsyncResult("one").revoke()
        assert broadcasts == [("revoke", "one", {"one"})]
        assert durable.get("one").status == Status.ENDING

    @pytest.mark.parametrize("many", [list, tuple, set])
    def test_many_ids(self, durable: Durable, ids: list[str], many: Any) -> None:
        durable.app.control.revoke(many(["one", "two"]))
        assert [e.task_id for e in durable.list(status="ending")] == ["one", "two"]

    def test_a_group(self, durable: Durable, ids: list[str]) -> None:
        GroupResult("g", [durable.app.AsyncResult(i) for i in ("one", "two")], app=durable.app).revoke()
        assert durable.count(status="ending") == 2

    def test_terminate_is_a_revoke(self, durable: Durable, ids: list[str]) -> None:
        durable.app.control.terminate("one")
        assert durable.get("one").status == Status.ENDING

    def test_nothing_is_stored_for_a_task_whose_result_nobody_wants(self, durable: Durable) -> None:
        @durable.task(name="silent", ignore_result=True, shared=False)
        def silent() -> None: ...

        result = silent.apply_async(countdown=600)
        result.revoke()
        assert durable.get(result.id).status == Status.ENDING
        assert result.state == "PENDING"

    def test_a_result_store_that_is_away_is_no_error(
        self,
        durable: Durable,
        ids: list[str],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def away(*_: Any, **__: Any) -> None:
            raise ConnectionError("away")

        monkeypatch.setattr(durable.app.backend, "mark_as_revoked", away)
        durable.app.control.revoke(ids)
        assert durable.count(status="ending") == 3
        assert [record.levelname for record in caplog.records if "away" in record.message] == ["WARNING"]


class TestInstalling:
    def test_a_control_that_was_used_before_is_made_again(self) -> None:
        app = Celery("proj", set_as_current=False)
        assert type(app.control) is Control
        Durable(app)
        assert type(app.control) is DurableControl

    def test_a_control_of_the_users_own_stays_one(self) -> None:
        class Own(Control):
            def greet(self) -> str:
                return "hello"

        app = Celery("proj", control=Own, set_as_current=False)
        Durable(app)
        assert isinstance(app.control, DurableControl)
        assert app.control.greet() == "hello"  # type: ignore[attr-defined]


def test_an_eager_task_needs_no_database_to_be_revoked() -> None:
    app = Celery("proj", set_as_current=False)
    Durable(app)

    @app.task(base=DurableTask, shared=False)
    def quick() -> int:
        return 7

    result = quick.apply()
    result.revoke()
    assert result.state == "REVOKED"
