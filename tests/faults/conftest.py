"""The fault tests run a project of their own, on brokers that give a killed worker's messages back soon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nodes import Bench
from tests.nodes.bench import FAST_REDELIVERY
from tests.nodes.nursery import Nursery
from tests.nodes.workers import CeleryProcess


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(autouse=True)
def many_processes_start_in_no_time(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CeleryProcess, "nursery", nursery)


@pytest.fixture
def bench_module() -> str:
    return "tests.faults.proj"


@pytest.fixture
def bench(bench: Bench) -> Bench:
    if bench.deployment.broker == "redis":
        bench.configure(broker_transport_options=FAST_REDELIVERY)
    return bench
