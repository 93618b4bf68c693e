"""Chords outlive the worker that asks whether all members are there."""

from __future__ import annotations

import pytest
from celery import chord

from tests.nodes import FAST_REDELIVERY, Bench, on


@pytest.fixture
def bench_module() -> str:
    return "tests.integration.chords_proj"


@on("redis-postgres")
class TestAWorkerDiesWhileItAsks:
    def test_and_the_chord_goes_on_once(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        # A result store that cannot count.
        bench.env["CELERY_RESULT_BACKEND"] = f"db+{bench.store_url}"
        monkeypatch.setenv("CELERY_RESULT_BACKEND", bench.env["CELERY_RESULT_BACKEND"])
        bench.configure(broker_transport_options=FAST_REDELIVERY)
        bench.beat()
        worker = bench.worker(concurrency=1, env={"PROJ_STAYS_AT_IT": "1"})
        project = bench.project
        result = chord([project.member.s(1), project.member.s(2)])(project.gather.s())
        bench.wait_for(lambda: bench.witness.count("unlock", "asked"), 30, "it asks")
        for _ in range(2):
            # By then its main process knows that the question is being asked.
            assert bench.app().control.ping([worker.hostname], timeout=10)
        worker.kill()
        bench.worker(name="second", concurrency=1)
        assert result.get(timeout=30) == [1, 2]
        assert bench.witness.count(result.id, "gathered") == 1
