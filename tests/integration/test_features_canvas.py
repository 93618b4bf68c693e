"""Canvases of durable and plain tasks go on once, in order, through every sleep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, TaskRevokedError

from celery_durable import TaskQuarantined
from celery_durable.records import Due
from tests.integration.features_support import BOTH, features_bench, outbox_delays, seen
from tests.integration.support import wait_for_status, wait_until_asleep
from tests.nodes import Bench, Servers


@pytest.fixture(scope="module", params=BOTH)
def bench(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """One worker and one beat for all tests of this module."""
    with features_bench(request.param, servers, tmp_path_factory.mktemp("canvas")) as bench:
        yield bench


class TestChain:
    def test_durable_and_plain_links_run_once_in_order(self, bench: Bench) -> None:
        t = bench.project
        result = chain(t.plain.s(3), t.nap.s(), t.quick.s(), t.plain.s(), t.nap.s()).delay()
        assert result.get(timeout=20) == 3
        links = [result, *(parents_of(result))]
        assert len(links) == 5
        order = [
            (link.id, step)
            for link, step in zip(reversed(links), ("plain", "body", "body", "plain", "body"), strict=True)
        ]
        first_seen = [bench.witness.sightings(task_id, step)[0].time for task_id, step in order]
        assert first_seen == sorted(first_seen)
        for link in links:
            assert bench.witness.count(link.id, "after") <= 1
            assert bench.witness.count(link.id, "plain") <= 1

    def test_a_failure_after_a_sleep_stops_the_chain_and_is_told_once(self, bench: Bench) -> None:
        t = bench.project
        result = chain(t.quick.s(1), t.fails.s(seconds=1.1), t.nap.s(), t.plain.s()).apply_async(
            link_error=[t.errback.s(), t.old_errback.s(), t.durable_errback.s()]
        )
        with pytest.raises(KeyError, match="durable"):
            result.get(timeout=20)
        failed = result.parent.parent
        seen(bench, failed.id, "errback KeyError")
        seen(bench, failed.id, "old errback")
        seen(bench, failed.id, "durable errback")
        assert bench.witness.count(result.id) == 0
        assert bench.witness.count(result.parent.id) == 0

    def test_a_cancelled_sleep_ends_the_chain(self, bench: Bench) -> None:
        t = bench.project
        result = chain(t.nap.s(1, 600), t.plain.s()).delay()
        wait_until_asleep(bench, result.parent)
        result.parent.revoke()
        wait_for_status(bench, result.parent.id, "cancelled")
        assert result.parent.state == "REVOKED"
        assert bench.witness.count(result.id) == 0


class TestGroup:
    def test_results_are_in_order(self, bench: Bench) -> None:
        t = bench.project
        members = [t.nap.s(1, 1.6), t.plain.s(2), t.quick.s(3), t.nap.s(4, 1.1)]
        assert group(members).delay().get(timeout=20) == [1, 2, 3, 4]

    def test_a_group_within_a_chain(self, bench: Bench) -> None:
        t = bench.project
        canvas = chain(
            t.nap.s(5), group(t.nap.s(), t.plain.s(), chain(t.quick.s(), t.nap.s())), t.collect.s()
        )
        result = canvas.delay()
        assert result.get(timeout=25) == [5, 5, 5]
        seen(bench, result.id, "collect")


class TestChord:
    def test_the_body_gets_all_results_in_order_once(self, bench: Bench) -> None:
        t = bench.project
        result = chord([t.nap.s(1, 1.5), t.plain.s(2), t.quick.s(3), t.nap.s(4)])(t.collect.s())
        assert result.get(timeout=20) == [1, 2, 3, 4]
        seen(bench, result.id, "collect")

    def test_a_durable_body_sleeps(self, bench: Bench) -> None:
        t = bench.project
        result = chord([t.nap.s(1), t.plain.s(2)])(t.gather.s())
        assert result.get(timeout=20) == [1, 2]
        assert bench.witness.steps(result.id).count("gathered") == 1

    def test_chords_within_chords_and_chains(self, bench: Bench) -> None:
        t = bench.project
        inner = chord([t.nap.s(1), t.plain.s(2)], t.total.s())
        result = chain(chord([inner, chain(t.quick.s(10), t.nap.s())], t.total.s()), t.nap.s()).delay()
        assert result.get(timeout=30) == 13

    # Celery polls both, and raises what it sees first: the member's failure, or the chord's.

    def test_a_member_that_fails_after_a_sleep_fails_the_chord_once(self, bench: Bench) -> None:
        t = bench.project
        result = chord([t.plain.s(1), t.fails.s(seconds=1.1)])(t.collect.s().on_error(t.errback.s()))
        with pytest.raises((KeyError, ChordError)):
            result.get(timeout=20)
        bench.wait_for(result.ready)
        assert isinstance(result.result, ChordError)
        seen(bench, result.id, "errback ChordError")
        assert bench.witness.count(result.id, "collect") == 0

    def test_a_cancelled_member_fails_the_chord_once(self, bench: Bench) -> None:
        t = bench.project
        result = chord([t.plain.s(1), t.nap.s(2, 600)])(t.collect.s().on_error(t.errback.s()))
        sleeper = result.parent.results[1]
        wait_until_asleep(bench, sleeper)
        sleeper.revoke()
        with pytest.raises((TaskRevokedError, ChordError)):
            result.get(timeout=20)
        bench.wait_for(result.ready)
        assert isinstance(result.result, ChordError)
        seen(bench, result.id, "errback ChordError")
        assert bench.witness.count(result.id, "collect") == 0

    def test_a_quarantined_member_fails_the_chord_once(self, bench: Bench) -> None:
        t = bench.project
        result = chord([t.plain.s(1), t.crashes.s()])(t.collect.s().on_error(t.errback.s()))
        with pytest.raises((TaskQuarantined, ChordError), match="died once"):
            result.get(timeout=20)
        bench.wait_for(result.ready)
        assert isinstance(result.result, ChordError)
        seen(bench, result.id, "errback ChordError")
        assert bench.witness.count(result.id, "collect") == 0
        wait_for_status(bench, result.parent.results[1].id, "quarantined")


class TestChordUnlock:
    """Where the result store has no chords of its own, Celery asks again and again."""

    @pytest.mark.parametrize("bench", ["rabbitmq-postgres"], indirect=True)
    def test_it_waits_as_a_row_with_a_growing_interval(self, bench: Bench) -> None:
        t = bench.project
        result = chord([t.plain.s(1), t.nap.s(2, 600)])(t.collect.s())
        sleeper = result.parent.results[1]
        wait_until_asleep(bench, sleeper)
        bench.wait_for(
            lambda: max(outbox_delays(bench), default=0) > 1.2, message="it asks less and less often"
        )
        bench.wait_for(bench.queue_is_empty)
        bench.app().durable.store.verdicts.move([sleeper.id], Due())
        assert result.get(timeout=20) == [1, 2]
        bench.wait_for(lambda: not outbox_delays(bench))

    @pytest.mark.parametrize("bench", ["rabbitmq-postgres"], indirect=True)
    def test_of_plain_members_it_waits_as_ever(self, bench: Bench) -> None:
        t = bench.project
        assert chord([t.plain.s(1), t.plain.s(2)])(t.collect.s()).get(timeout=20) == [1, 2]
        assert not outbox_delays(bench)


class TestLinks:
    def test_callbacks_run_once_with_the_value(self, bench: Bench) -> None:
        t = bench.project
        links = [t.plain.s(), t.nap.s(), group(t.quick.s(), t.plain.s())]
        frozen = [link.freeze() for link in links]
        result = t.nap.apply_async((6,), link=links)
        assert result.get(timeout=20) == 6
        assert frozen[0].get(timeout=20) == 6
        assert frozen[1].get(timeout=20) == 6
        assert frozen[2].get(timeout=20) == [6, 6]
        seen(bench, frozen[0].id, "plain")
        seen(bench, frozen[1].id, "after")

    def test_on_error_of_a_group(self, bench: Bench) -> None:
        t = bench.project
        result = group(t.fails.s(seconds=1.1), t.plain.s(1)).on_error(t.errback.s()).delay()
        with pytest.raises(KeyError):
            result.get(timeout=20)
        seen(bench, result.results[0].id, "errback KeyError")


def parents_of(result: object) -> list[object]:
    parents = []
    while (result := result.parent) is not None:  # type: ignore[attr-defined]
        parents.append(result)
    return parents
