"""``replace()`` hands the id over: the successor runs once, with a journal of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord
from kombu.utils.uuid import uuid

from tests.integration.features_support import BOTH, features_bench, halt_at, seen
from tests.integration.support import wait_for_status
from tests.nodes import Bench, Servers

RESULTS: dict[str, Any] = {
    "durable": 4,
    "itself": 4,
    "plain": 4,
    "chain": 4,
    "group": [4, 5],
    "chord": [4, 5],
}
#: How the row of the id ends: it belongs to a durable successor, a plain one leaves it alone.
ENDS = {
    "durable": "succeeded",
    "itself": "succeeded",
    "plain": "replaced",
    "chain": "succeeded",
    "group": "replaced",
    "chord": "succeeded",
}


@pytest.fixture(scope="module", params=BOTH)
def bench(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """One worker and one beat for all tests of this module."""
    with features_bench(request.param, servers, tmp_path_factory.mktemp("replace")) as bench:
        yield bench


class TestReplacement:
    """Each test plays every kind at the same time, for most of that time is sleep."""

    def test_it_gives_the_result(self, bench: Bench) -> None:
        results = {how: bench.project.replaces.delay(how, 4) for how in RESULTS}
        for how, result in results.items():
            assert result.get(timeout=25) == RESULTS[how], how
            wait_for_status(bench, result.id, ENDS[how])
            seen(bench, result.id, "step", times_of_step(how))

    def test_it_runs_once_where_the_worker_died_between_publish_and_finish(self, bench: Bench) -> None:
        results = {how: self.send_to_its_death(bench, how) for how in RESULTS}
        for how, result in results.items():
            assert result.get(timeout=25) == RESULTS[how], how
            seen(bench, result.id, "kill before finish")
            wait_for_status(bench, result.id, ENDS[how])
            assert bench.witness.count(result.id, "step") == times_of_step(how), how
            if how in ("durable", "chain"):
                seen(bench, result.id, "after")

    def send_to_its_death(self, bench: Bench, how: str) -> Any:
        task_id = uuid()
        halt_at(bench, "before finish", task_id)
        return bench.project.replaces.apply_async((how, 4), task_id=task_id)

    def test_a_chain_goes_on_after_it(self, bench: Bench) -> None:
        t = bench.project
        results = {how: chain(t.replaces.s(how, 4), t.plain.s(), t.nap.s()).delay() for how in RESULTS}
        for how, result in results.items():
            assert result.get(timeout=30) == RESULTS[how], how


def times_of_step(how: str) -> int:
    return 2 if how == "itself" else 1


class TestWithinOthers:
    def test_a_chord_counts_the_successor(self, bench: Bench) -> None:
        t = bench.project
        members = [
            t.replaces.s("durable", 1),
            t.replaces.s("plain", 2),
            t.replaces.s("chain", 3),
            t.plain.s(4),
        ]
        result = chord(members)(t.collect.s())
        assert result.get(timeout=30) == [1, 2, 3, 4]
        seen(bench, result.id, "collect")

    def test_callbacks_follow_the_successor(self, bench: Bench) -> None:
        t = bench.project
        link = t.plain.s()
        followed = link.freeze()
        t.replaces.apply_async(("durable", 6), link=link)
        assert followed.get(timeout=20) == 6
        seen(bench, followed.id, "plain")
