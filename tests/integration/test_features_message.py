"""A message stays what it was sent as, through any number of sleeps, retries and recoveries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.features_support import BOTH, features_bench, requests_of, seen
from tests.integration.support import row, wait_for_status, wait_until_asleep
from tests.nodes import Bench, Servers

ACCEPTED = ["json", "pickle", "msgpack", "yaml", "own"]


@pytest.fixture(scope="module", params=BOTH)
def bench(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """One worker and one beat for all tests of this module."""
    folder = tmp_path_factory.mktemp("message")
    settings: dict[str, Any] = {"accept_content": ACCEPTED, "task_queue_max_priority": 9}
    with features_bench(request.param, servers, folder, queues="features,special", **settings) as bench:
        yield bench


class TestEverythingAtOnce:
    @pytest.mark.parametrize("mode", ["json", "pickle"])
    def test_each_run_sees_the_same_request(self, bench: Bench, mode: str) -> None:
        t = bench.project
        payload = {"number": 1} if mode == "json" else t.Traced([1, 2])
        result = send_everything(bench, mode, payload)
        expected = {"number": 1} if mode == "json" else [1, 2]
        assert result.get(timeout=30) == [expected, 7]
        runs = requests_of(bench, result.id)
        # Two sleeps, the retry, the kill, the third sleep.
        assert [run.pop("retries") for run in runs] == [0, 0, 0, 1, 1, 1]
        assert [run.pop("eta") is None for run in runs] == [True, True, True, False, False, False]
        first = runs[0]
        for run in runs[1:]:
            assert run == first
        assert first["id"] == f"my-{mode}-id"
        assert first["stamps"] == {"tenant": "acme"}
        assert first["timelimit"] == [120, 100]
        assert first["shadow"] == "a shadow"
        assert first["argsrepr"] == "(hidden)"
        assert first["reply_to"] == "a-reply-queue"
        assert first["delivery_info"]["priority"] == 5
        assert first["custom"] == {"deep": [1, {"er": None}]}
        assert first["expires"] is not None
        seen(bench, result.id, "first")
        seen(bench, result.id, "last")
        seen(bench, f"my-{mode}-id", "linked")
        ended = wait_for_status(bench, result.id, "succeeded")
        assert ended.message is not None
        assert ended.message.compression == "application/x-gzip"
        types = {"json": "application/json", "pickle": "application/x-python-serialize"}
        assert ended.message.content_type == types[mode]

    def test_only_workers_unpickle(self, bench: Bench) -> None:
        t = bench.project
        result = t.echo.apply_async((t.Traced("only workers"),), serializer="pickle")
        result.get(timeout=20)
        worker, beat = bench.processes[:2]
        pids = {sighting.pid for sighting in bench.witness.sightings("unpickled", "only workers")}
        assert pids
        assert beat.pid not in pids
        assert pids <= set(worker.tree())


def send_everything(bench: Bench, mode: str, payload: Any) -> Any:
    t = bench.project
    task_id = f"my-{mode}-id"
    call = t.everything.s(payload, mode=mode)
    call.stamp(tenant="acme")
    return call.apply_async(
        task_id=task_id,
        queue="special",
        priority=5,
        headers={"custom": {"deep": [1, {"er": None}]}},
        expires=3600,
        time_limit=120,
        soft_time_limit=100,
        link=t.linked.s(about=task_id),
        link_error=t.errback.s(),
        shadow="a shadow",
        argsrepr="(hidden)",
        reply_to="a-reply-queue",
        serializer=mode,
        compression="gzip",
    )


class TestSerializers:
    @pytest.mark.parametrize("serializer", ACCEPTED)
    def test_arguments_come_through_two_sleeps(self, bench: Bench, serializer: str) -> None:
        result = bench.project.echo.apply_async(("ä", 1, [2]), {"key": None}, serializer=serializer)
        assert result.get(timeout=20) == [["'ä'", "1", "[2]"], {"key": "None"}]


class TestGrowth:
    def test_ten_sleeps_add_nothing(self, bench: Bench) -> None:
        result = bench.project.many_sleeps.apply_async((10,), headers={"custom": "x"}, compression="gzip")
        asleep = wait_until_asleep(bench, result)
        assert result.get(timeout=40) == 10
        seen(bench, result.id, "end")
        ended = row(bench, result.id)
        assert ended is not None
        assert asleep.message == ended.message
