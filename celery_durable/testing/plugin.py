"""The fixtures, and a hook. Nothing of Celery is imported before one of them is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from celery_durable.testing.clock import DurableClock

#: Where the item of a test has its clock.
_CLOCK = pytest.StashKey["DurableClock"]()


@pytest.hookimpl(trylast=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Fail a test in which no run has come to the crash point: here it is the test, later its teardown."""
    clock = item.stash.get(_CLOCK, None)
    if clock is not None and (unreached := clock.faults.why_unreached()):
        pytest.fail(unreached, pytrace=False)


@pytest.fixture
def durable_celery_app() -> Any:
    """The app under test. Define a fixture of this name that returns yours."""
    from celery_durable.testing.app import durable_app as new_app  # noqa: PLC0415

    return new_app()


@pytest.fixture
def durable_config() -> dict[str, Any]:
    """Celery settings for the test, over the app's own. Define a fixture of this name that returns some."""
    return {}


@pytest.fixture
def durable_clock(
    request: pytest.FixtureRequest, durable_celery_app: Any, durable_config: dict[str, Any]
) -> Iterator[DurableClock]:
    """Durable time, and what becomes due in it. The app has everything it needs in memory meanwhile."""
    from celery_durable.testing.clock import DurableClock  # noqa: PLC0415

    with DurableClock(durable_celery_app, durable_config) as clock:
        request.node.stash[_CLOCK] = clock
        yield clock
        # The hook has looked at a test that passed, and one that failed has said why.
        clock.faults.forget_orders()
        del request.node.stash[_CLOCK]


@pytest.fixture
def durable_app(durable_clock: DurableClock) -> Any:
    """The app under test, with a broker, a result store and a database in memory."""
    return durable_clock.app
