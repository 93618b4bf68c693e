"""The protocol under everything that may happen to it, on the real store."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from celery_durable.store import Store
from tests.model.machine import Machine

#: How many on each database. For a long run: MODEL_EXAMPLES=20000, and another MODEL_SEED each time.
EXAMPLES = int(os.environ.get("MODEL_EXAMPLES", "2000"))
EXAMPLES_ON_POSTGRESQL = EXAMPLES // 40
SEED = int(os.environ.get("MODEL_SEED", "1"))
#: A failure is made as short as it can be, which takes its time; MODEL_SHRINK=0 shows it as it came.
PHASES = [Phase.generate, Phase.shrink] if os.environ.get("MODEL_SHRINK") != "0" else [Phase.generate]
#: The examples are shared out, so that two processes can work on them.
PARTS = 4


def run_model(url: str, examples: int, seed_number: int) -> None:
    store = Store(url, namespace="model")
    store.upgrade()
    machine: type[Machine] = type("Machine", (Machine,), {"store": store})
    try:
        run_state_machine_as_test(
            seed(seed_number)(machine),
            settings=settings(
                max_examples=examples,
                stateful_step_count=40,
                deadline=None,
                database=None,
                print_blob=True,
                phases=PHASES,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        store.dispose()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_lost_or_done_twice(part: int) -> None:
    run_model("sqlite://", EXAMPLES // PARTS, SEED * PARTS + part)


@pytest.mark.timeout(0)
def test_nothing_is_lost_or_done_twice_on_postgresql(postgres_url: str) -> None:
    run_model(postgres_url, EXAMPLES_ON_POSTGRESQL, SEED)
