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


@pytest.mark.parametrize("how", RESULTS)
class TestReplacement:
    def test_it_gives_the_result(self, bench: Bench, how: str) -> None:
        result = bench.project.replaces.delay(how, 4)
        assert result.get(timeout=25) == RESULTS[how]
        wait_for_status(bench, result.id, ENDS[how])
        seen(bench, result.id, "step", 1 if how != "itself" else 2)

    def test_it_runs_once_where_the_worker_died_between_publish_and_finish(
        self, bench: Bench, how: str
    ) -> None:
        task_id = uuid()
        halt_at(bench, "before finish", task_id)
        result = bench.project.replaces.apply_async((how, 4), task_id=task_id)
        assert result.get(timeout=25) == RESULTS[how]
        seen(bench, task_id, "kill before finish")
        wait_for_status(bench, task_id, ENDS[how])
        assert bench.witness.count(task_id, "step") == (1 if how != "itself" else 2)
        if how in ("durable", "chain"):
            seen(bench, task_id, "after")

    def test_a_chain_goes_on_after_it(self, bench: Bench, how: str) -> None:
        t = bench.project
        links = chain(t.replaces.s(how, 4), t.plain.s(), t.nap.s())
        assert links.delay().get(timeout=30) == RESULTS[how]


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
