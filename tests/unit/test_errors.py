"""Errors say what happened and what to do, and survive processes and result stores."""

from __future__ import annotations

import pickle

import pytest
from celery import Celery
from celery.backends.base import Backend
from kombu.exceptions import OperationalError

from celery_durable import errors

EXAMPLES = [
    errors.ConfigurationError("durable_x is wrong", "durable_y is wrong"),
    errors.StoreUnavailable("connection refused"),
    errors.StoreUnavailable("connection refused", "a send"),
    errors.StoreUnavailable("connection refused", "a revoke"),
    errors.LoginRefused("no such database"),
    errors.WrongTables("no such column: crashes"),
    errors.LeaseLost("id-1", 7, "another worker owns it"),
    errors.LeaseRenewalTimedOut("id-1", 7),
    errors.ReplayDivergence("proj.onboard", "id-1", 3, "sleep", "step send"),
    errors.StepFailed("proj.Broken", "boom"),
    errors.StepLimitExceeded(10_000),
    errors.PayloadTooLarge(2_000_000, 1_048_576),
    errors.NotDurable("sleep()"),
    errors.NotDurable("step()", "inside a step"),
    errors.ExecutionNotFound("id-1"),
    errors.OperationRefused("wake", "id-1", "it is running"),
    errors.TaskQuarantined("id-1", "it killed 4 workers"),
]


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Celery("errors", backend="cache+memory://", set_as_current=False).backend


def by_type(error: BaseException) -> str:
    return type(error).__name__


@pytest.mark.parametrize("error", EXAMPLES, ids=by_type)
def test_pickle_keeps_an_error_and_its_data(error):
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=by_type)
def test_a_json_result_store_keeps_an_error_and_its_data(backend, error):
    stored = backend.decode(backend.encode(backend.prepare_exception(error)))
    copy = backend.exception_to_python(stored)

    assert type(copy) is type(error)
    assert str(copy) == str(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=by_type)
def test_every_error_is_a_durable_error(error):
    assert isinstance(error, errors.DurableError)


@pytest.mark.parametrize("signal", [errors.Park, errors.LeaseInterrupt])
def test_control_flow_passes_except_exception(signal):
    assert issubclass(signal, BaseException)
    assert not issubclass(signal, Exception)
    assert type(pickle.loads(pickle.dumps(signal()))) is signal


def test_an_unavailable_store_is_what_celery_calls_an_operational_error():
    assert isinstance(errors.StoreUnavailable("refused"), OperationalError)


def test_a_database_that_is_away_is_told_by_what_it_has_broken_off():
    for error in (errors.StoreUnavailable("gone"), errors.LoginRefused("gone"), errors.WrongTables("gone")):
        assert "Nothing is lost" in str(error)
        error.broke_off("a send")
        assert "The task was not sent: send it again" in str(error)
        assert "Nothing is lost" not in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        error.broke_off("a start")
        assert "start it again" in str(error)


def test_a_login_that_is_refused_is_not_waited_for():
    assert "does not mend itself" in str(errors.LoginRefused("no such database"))


def test_a_timed_out_renewal_is_a_lost_lease_that_names_task_and_token():
    error = errors.LeaseRenewalTimedOut("id-1", 7)

    assert isinstance(error, errors.LeaseLost)
    assert "id-1" in str(error)
    assert "token 7" in str(error)


def test_a_divergence_names_task_position_and_both_calls():
    message = str(errors.ReplayDivergence("proj.onboard", "id-1", 3, "sleep", "step send"))

    for part in ("proj.onboard", "id-1", "position 3", "sleep", "step send", "release"):
        assert part in message


def test_not_durable_names_the_ways_to_run_a_task_in_a_test():
    message = str(errors.NotDurable("sleep()"))

    assert message.startswith("sleep() was called outside a run of a durable task")
    assert ".apply()" in message
    assert "pytest plugin" in message


def test_a_configuration_error_prints_one_problem_a_line():
    assert str(errors.ConfigurationError("one", "two")).splitlines() == ["one", "two"]
