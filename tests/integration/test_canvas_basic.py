"""Chains, links, groups and chords of durable and plain tasks, with result stores of both kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord, group, uuid

from tests.integration.support import (
    row,
    running_bench,
    wait_for_status,
    wait_until_asleep,
)
from tests.nodes import Bench, Servers, on

#: Results in Redis, which counts chords itself; in PostgreSQL and SQLite, where a task unlocks them.
STORES = ("redis-postgres", "rabbitmq-postgres", "embedded-sqlite")


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """A worker and a beat for all tests of this module that break nothing."""
    with running_bench(request.param, servers, tmp_path_factory.mktemp("running")) as bench:
        yield bench


def results_of(result: Any) -> list[Any]:
    """A result with those before it, the first of the chain at the head."""
    found: list[Any] = []
    while result is not None:
        found.insert(0, result)
        result = result.parent
    return found


@on(*STORES, fixture="running")
class TestChain:
    def test_durable_and_plain_links_go_on_in_order(self, running: Bench) -> None:
        project = running.project
        work = chain(project.double.s(1, 1.2), project.add.s(1), project.double.s(1.2), project.add.s(10))
        result = work.delay()
        links = results_of(result)
        wait_until_asleep(running, links[0])
        assert [link.state for link in links[1:]] == ["PENDING"] * 3
        assert result.get(timeout=20) == 16
        assert [link.get(timeout=5) for link in links] == [2, 3, 6, 16]
        assert running.witness.steps(links[0].id) == ["body", "body", "doubled"]
        assert running.witness.steps(links[1].id) == ["add"]
        assert running.witness.steps(links[2].id) == ["body", "body", "doubled"]
        assert running.witness.steps(links[3].id) == ["add"]

    def test_a_durable_link_is_a_row_with_its_own_id(self, running: Bench) -> None:
        project = running.project
        result = chain(project.add.s(1, 1), project.double.s()).delay()
        assert result.get(timeout=15) == 4
        found = row(running, result.id)
        assert found is not None
        assert found.task_name == "tests.integration.proj.double"

    def test_a_failure_ends_the_chain(self, running: Bench) -> None:
        project = running.project
        errback = project.failed.s()
        result = chain(project.end_as.si("exception", 1.2), project.add.s(1)).apply_async(link_error=errback)
        with pytest.raises(KeyError):
            results_of(result)[0].get(timeout=15)
        first, last = results_of(result)
        running.wait_for(lambda: running.witness.count(first.id, "errback KeyError"))
        assert running.witness.count(last.id) == 0


@on("redis-postgres", fixture="running")
class TestLink:
    def test_every_callback_runs_once_with_the_value(self, running: Bench) -> None:
        project, task_id, durable = running.project, uuid(), uuid()
        callbacks = [
            project.note.s(about=task_id, what="plain"),
            project.note.s(about=task_id, what="second"),
            project.double.s(1.2).set(task_id=durable),
        ]
        result = project.doze.apply_async((21, 1.2), task_id=task_id, link=callbacks)
        assert result.get(timeout=15) == 21
        wait_for_status(running, durable, "succeeded")
        assert running.witness.steps(durable) == ["body", "body", "doubled"]
        running.wait_for(lambda: len(running.witness.steps(task_id)) == 5)
        assert sorted(running.witness.steps(task_id)) == ["body", "body", "plain", "second", "woken"]

    def test_a_callback_with_a_countdown_waits_as_a_row(self, running: Bench) -> None:
        project = running.project
        plain, durable = uuid(), uuid()
        callbacks = [
            project.note.s().set(countdown=2, task_id=plain),
            project.double.s().set(countdown=2, task_id=durable),
        ]
        result = project.doze.apply_async((21, 0), link=callbacks)
        assert wait_for_status(running, durable, "scheduled").owner is None
        assert result.get(timeout=15) == 21
        assert running.app().AsyncResult(durable).get(timeout=15) == 42
        assert running.app().AsyncResult(plain).get(timeout=15) == 21
        (ended,) = running.witness.sightings(result.id, "woken")
        for task_id in (plain, durable):
            assert running.witness.sightings(task_id)[0].time - ended.time >= 1.9

    def test_the_result_knows_its_children(self, running: Bench) -> None:
        project = running.project
        result = chain(project.double.s(1, 1.2), project.add.s(1), project.double.s()).delay()
        assert result.get(timeout=20) == 6
        first = results_of(result)[0]
        assert [value for _, value in first.collect()] == [2, 3, 6]


@on("redis-postgres", fixture="running")
class TestGroup:
    def test_results_come_in_order(self, running: Bench) -> None:
        project = running.project
        members = [project.doze.s(0, 1.6), project.add.s(1), project.doze.s(2, 1.2), project.double.s(1.5)]
        assert group(members).delay().get(timeout=20) == [0, 1, 2, 3]


@on(*STORES, fixture="running")
class TestChord:
    def test_a_plain_body_gets_the_results_of_sleepers_once(self, running: Bench) -> None:
        project = running.project
        header = [project.doze.s(1, 1.5), project.add.s(2), project.doze.s(3, 1.2), project.doze.s(4, 0)]
        task_id = uuid()
        body = project.note.s(about=task_id, what="chord body")
        result = chord(header)(body)
        assert result.get(timeout=20) == [1, 2, 3, 4]
        assert running.witness.count(task_id, "chord body") == 1

    def test_a_durable_body_sleeps_and_goes_on(self, running: Bench) -> None:
        project = running.project
        header = group(project.doze.s(number, 1.2) for number in range(3))
        result = chord(header)(project.double.s(1.2))
        assert result.get(timeout=20) == [0, 1, 2, 0, 1, 2]
        assert running.witness.steps(result.id) == ["body", "body", "doubled"]

    def test_a_group_in_a_chain_is_a_chord(self, running: Bench) -> None:
        project = running.project
        work = chain(
            project.double.s(1, 1.2),
            group(project.double.s(), project.add.s(5), project.double.s(1.2)),
            project.add.s(),
        )
        assert work.delay().get(timeout=25) == 4 + 7 + 4

    def test_a_failing_member_fails_the_chord(self, running: Bench) -> None:
        project = running.project
        body = project.note.s(what="body of a failed chord")
        result = chord([project.end_as.s("exception", 1.2), project.doze.s(1, 1.2)])(body)
        with pytest.raises(Exception, match="missing"):
            result.get(timeout=20)
        assert running.witness.count(step="body of a failed chord") == 0


@on("redis-postgres", fixture="running")
class TestReplace:
    def test_the_replacement_takes_the_id_over(self, running: Bench) -> None:
        result = running.project.replaced.delay(4)
        assert result.get(timeout=20) == 9
        assert running.witness.steps(result.id) == ["body", "body", "add"]

    def test_a_replaced_link_hands_the_chain_on(self, running: Bench) -> None:
        project = running.project
        result = chain(project.replaced.s(4), project.add.s(100)).delay()
        assert result.get(timeout=20) == 109
