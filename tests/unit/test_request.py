"""What a request does about a terminate, and about a failure, by what is known of its claim."""

from __future__ import annotations

import itertools
import signal
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.pool import MaybeEncodingError

from celery_durable.claiming import Verdict
from celery_durable.codec import OutcomeCodec
from celery_durable.errors import StoreUnavailable
from celery_durable.records import LeaseKey
from celery_durable.worker import request as request_module
from celery_durable.worker.book import Book
from celery_durable.worker.request import DurableRequest

KEY = LeaseKey("id", "w@here:1", 1)


class Terminated(DurableRequest):
    """A request without a message, whose run is only said to be stopped."""

    id = "id"

    def __init__(self, heard: LeaseKey | None = None) -> None:
        self._stopped: list[int] = []
        upkeep = SimpleNamespace(soon=lambda job: None)
        worker = SimpleNamespace(drain=lambda: heard and self.on_claimed(heard), upkeep=upkeep)
        worker.acknowledge = lambda request: None
        self._durable: Any = SimpleNamespace(worker=worker, store=SimpleNamespace(verdicts=None))

    def _stop_run(self, pool: Any, number: int) -> None:
        self._stopped.append(number)


def test_what_runs_is_stopped_at_once():
    request = Terminated()
    request.on_claimed(KEY)
    request.terminate(None, "KILL")
    assert request._stopped == [signal.SIGKILL]


@pytest.mark.parametrize("signal_name", [None, "TERM"])
def test_a_claim_that_has_not_been_heard_is_waited_for(signal_name):
    """It may be that of the verdict, which has no body to stop, but would be told late."""
    request = Terminated()
    request.terminate(None, signal_name)
    assert request._stopped == []
    request.on_claimed(KEY)
    assert request._stopped == [signal.SIGTERM]


def test_a_claim_that_was_reported_and_not_read_yet_is_read_first():
    request = Terminated(heard=KEY)
    request.terminate(None)
    assert request._stopped == [signal.SIGTERM]


class Started(DurableRequest):
    """A request in a pool of processes, which kills what is known to run in one of them."""

    id = "id"
    name = "proj.task"
    acknowledged = True

    def __init__(self) -> None:
        self.killed: list[tuple[int, int]] = []
        self.number = 1
        self._task = SimpleNamespace(acks_late=True)
        self._apply_result = None
        worker = SimpleNamespace(drain=lambda: None, upkeep=SimpleNamespace(soon=lambda job: None))
        worker.interrupt_delivery = lambda number: False
        worker.acknowledge = lambda request: None
        self._durable: Any = SimpleNamespace(worker=worker, store=SimpleNamespace(verdicts=None))

    def send_event(self, *_: Any, **__: Any) -> None:
        pass

    def terminate_job(self, pid: int, number: int) -> None:
        self.killed.append((pid, number))


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["claimed", "accepted", "terminate"])), ids="-".join
)
def test_what_runs_is_killed_once_its_claim_and_its_process_are_known(order: tuple[str, ...]) -> None:
    """They are heard on two ways, in any order. Before its claim nothing is killed."""
    request = Started()
    hear = {
        "claimed": lambda: request.on_claimed(KEY),
        "accepted": lambda: request.on_accepted(4711, monotonic()),
        "terminate": lambda: request.terminate(request),
    }
    for what in order:
        assert request.killed == []
        hear[what]()
    assert request.killed == [(4711, signal.SIGTERM)]


class Adopted(DurableRequest):
    """A request that waits behind others."""

    id = "id"
    acknowledged = False

    def __init__(self, book: Book) -> None:
        self.number = book.register(self)
        self.delivery = None
        claims = SimpleNamespace(keep=lambda delivery, delay: None)
        worker = SimpleNamespace(acknowledge=lambda request: setattr(request, "acknowledged", True))
        self._durable: Any = SimpleNamespace(
            worker=worker, store=SimpleNamespace(claims=claims), settings=SimpleNamespace(resend_delay=120.0)
        )


def test_what_is_adopted_waits_as_a_row_until_its_claim_is_heard():
    book = Book()
    request = Adopted(book)
    assert (request.is_waiting, request.waits_as_row) == (True, False)
    request.adopt()
    assert (request.is_waiting, request.waits_as_row) == (False, True)
    book.report(request.number, Verdict.CLAIMED, KEY.owner, KEY.token)
    assert (request.holds_lease, request.waits_as_row) == (True, False)


# -- what the pool reports itself --------------------------------------------------------------------


class Abort(BaseException):
    """What the tracer lets out of a body."""


class Leases:
    """The row of one task: held under ``KEY`` or not, with an outcome or not."""

    def __init__(self) -> None:
        self.is_held = True
        self.outcome: Any = None
        self.is_away = False
        self.calls: list[str] = []

    def take_from_child(self, key: LeaseKey, owner: str, ttl: float, outcome: Any) -> LeaseKey | None:
        if self.is_away:
            raise StoreUnavailable("away")
        if not self.is_held or self.outcome is not None:
            return None
        self.outcome = outcome
        self.calls.append("outcome written")
        return LeaseKey(key.task_id, owner, key.token + 1)

    def recover(self, key: LeaseKey, max_crashes: int | None, delay: float) -> bool:
        self.calls.append(f"recovered, due in {delay:g} s" if delay else "recovered")
        return self.is_held

    def hand_back(self, key: LeaseKey, delay: float) -> bool:
        self.calls.append("handed back")
        return self.is_held

    def finish(self, key: LeaseKey, status: str) -> None:
        self.calls.append(f"{status} under {key.token}")


class Claimed(DurableRequest):
    """A request of which the claim is known."""

    id = "id"
    name = "proj.task"
    lease_key = KEY
    acknowledged = True

    def __init__(self) -> None:
        self.leases = Leases()
        upkeep = SimpleNamespace(soon=lambda job: job())
        self.worker = SimpleNamespace(drain=lambda: None, upkeep=upkeep, is_stopping=False)
        store = SimpleNamespace(leases=self.leases, runs=self.leases)
        runtime = SimpleNamespace(store=store, owner="w@here:main", outcome_codec=OutcomeCodec("json"))
        limits = SimpleNamespace(lease_ttl=60.0, max_crashes=3)
        self._durable: Any = SimpleNamespace(worker=self.worker, runtime=runtime, limits=lambda task: limits)
        self._task: Any = SimpleNamespace(name=self.name)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Celery was let tell."""
    told: list[Any] = []

    def tell(request: Claimed, exc_info: Any, **_: Any) -> None:
        request.leases.calls.append("told")
        told.append(exc_info.exception)

    monkeypatch.setattr(request_module.Request, "on_failure", tell)
    monkeypatch.setattr(request_module, "task_ready", lambda request: None)
    return told


def info_of(error: BaseException) -> Any:
    """What billiard reports of it."""
    return SimpleNamespace(exception=error, traceback="", type=type(error))


@pytest.mark.parametrize("error", [Abort("now"), RuntimeError("it has no code for that")])
def test_a_failure_that_only_the_pool_has_seen_is_told_when_it_is_in_the_row(
    told: list[Any], error: BaseException
) -> None:
    request = Claimed()
    request.on_failure(info_of(error))
    assert request.leases.calls == ["outcome written", "told", "failed under 2"]
    (failure,) = told
    assert isinstance(failure, Exception), "whoever tells it again raises it"
    assert repr(error) in repr(failure)


@pytest.mark.parametrize("return_ok", [False, True])
def test_a_failure_before_the_claim_is_kept_with_its_message(
    told: list[Any], monkeypatch: pytest.MonkeyPatch, return_ok: bool
) -> None:
    """Celery's tracer answers what it has not foreseen as an internal error, and tells nobody."""
    request = Claimed()
    request.lease_key = None  # type: ignore[assignment]
    kept: list[Any] = []
    monkeypatch.setattr(request, "_keep_unread", lambda exc_info, error: kept.append(error))
    error = ValueError("signal only works in main thread")
    request.on_failure(info_of(error), return_ok=return_ok)
    assert (kept, told) == ([error], [])


def test_a_failure_to_report_a_run_that_is_settled_is_not_told(told: list[Any]) -> None:
    """Its process has parked or ended it, or made it due again."""
    request = Claimed()
    request.leases.is_held = False
    request.on_failure(info_of(MaybeEncodingError("no", "value")))
    assert (request.leases.calls, told) == (["recovered"], [])
    assert request.is_over


def test_a_failure_after_another_outcome_was_written_is_a_crash_in_its_telling(told: list[Any]) -> None:
    request = Claimed()
    request.leases.outcome = "a value"
    request.on_failure(info_of(Abort()))
    assert (request.leases.calls, told) == (["recovered"], [])


def test_a_failure_that_cannot_be_written_is_not_told(told: list[Any]) -> None:
    request = Claimed()
    request.leases.is_away = True
    request.on_failure(info_of(Abort()))
    assert (request.leases.calls, told) == (["recovered"], [])


@pytest.mark.parametrize("why", ["the worker stops", "its lease is lost"])
def test_a_failure_of_what_is_being_stopped_is_none(told: list[Any], why: str) -> None:
    """Celery tells of none while it stops cold."""
    request = Claimed()
    request.worker.is_stopping = why == "the worker stops"
    request.is_lost = why == "its lease is lost"
    request.on_failure(info_of(Abort()))
    assert (request.leases.calls, told) == (["handed back"], [])


def test_a_failure_that_the_tracer_has_told_is_left_to_celery(told: list[Any]) -> None:
    request = Claimed()
    request.on_failure(info_of(ValueError("7")), return_ok=True)
    assert request.leases.calls == ["told"]


@pytest.mark.parametrize("why", ["its child was telling another outcome", "the database is away"])
def test_a_hard_limit_that_cannot_be_written_takes_the_lease_from_the_child_that_dies_of_it(
    told: list[Any], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Nobody else tells of that death, and the lease would have to run out."""
    monkeypatch.setattr(request_module, "fails_at_limit", lambda task: True)
    request = Claimed()
    request.leases.outcome = "a value" if "outcome" in why else None
    request.leases.is_away = "away" in why
    request.on_timeout(False, 5)
    # billiard kills the child when it has told us.
    assert (request.leases.calls, told) == (["recovered, due in 1 s"], [])
