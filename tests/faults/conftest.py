"""The fault tests run a project of their own, on brokers that give a killed worker's messages back soon."""

from __future__ import annotations

import pytest

from tests.nodes import Bench
from tests.nodes.bench import FAST_REDELIVERY


@pytest.fixture
def bench_module() -> str:
    return "tests.faults.proj"


@pytest.fixture
def bench(bench: Bench) -> Bench:
    if bench.deployment.broker == "redis":
        bench.configure(broker_transport_options=FAST_REDELIVERY)
    return bench
