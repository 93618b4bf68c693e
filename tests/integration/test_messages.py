"""Messages: copies do no harm, waiting ones are rows, and a sleep changes nothing in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import pytest
from celery import Celery, signals
from kombu.utils.json import loads

from celery_durable import Execution
from celery_durable.message import HEADER
from tests.integration.support import (
    row,
    running_bench,
    start_worker_and_beat,
    status,
    wait_for_status,
    wait_until_asleep,
)
from tests.nodes import Bench, Servers, on


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """A worker and a beat for all tests of this module that break nothing."""
    with running_bench(request.param, servers, tmp_path_factory.mktemp("running")) as bench:
        yield bench


@contextmanager
def copying(bench: Bench) -> Iterator[Callable[[], None]]:
    """What is sent within this block can be sent again, byte for byte, by the function it gives."""
    sent: list[dict[str, Any]] = []

    def keep(body: Any = None, **options: Any) -> None:
        sent.append({"body": body, **options})

    signals.before_task_publish.connect(keep)

    def send_again() -> None:
        with bench.app().producer_pool.acquire() as producer:
            for item in sent:
                producer.publish(
                    item["body"],
                    serializer="json",
                    headers=item["headers"],
                    exchange=item["exchange"],
                    routing_key=item["routing_key"],
                    **item["properties"],
                )

    try:
        yield send_again
    finally:
        signals.before_task_publish.disconnect(keep)


def send_wake_again(bench: Bench, row: Execution, wake: int) -> None:
    """A copy of a wake message of a row."""
    assert row.message is not None
    headers = loads(row.message.headers)
    send_id = headers.pop("durable", {}).get("send_id")
    headers["durable"] = {"send_id": send_id, "version": 0, "wake": wake}
    with bench.app().producer_pool.acquire() as producer:
        producer.publish(
            row.message.body,
            content_type=row.message.content_type,
            content_encoding=row.message.content_encoding,
            headers=headers,
            routing_key=row.message.routing_key,
        )


def essence(row: Execution | None) -> tuple[Any, ...]:
    """What a copy must not change."""
    assert row is not None
    return (row.status, row.token, row.owner, row.sends, row.crashes, row.outcome, len(row.journal))


def dropped(bench: Bench, task_id: str) -> int:
    """How many messages of a task the worker says that it has dropped."""
    lines = bench.processes[0].logs().splitlines()
    return len([line for line in lines if task_id in line and " dropped: " in line])


@on("redis-postgres", "rabbitmq-postgres", fixture="running")
class TestCopies:
    """The same message five more times: one run, nothing changes."""

    def test_while_it_runs(self, running: Bench) -> None:
        with copying(running) as send_again:
            result = running.project.tracked.delay()
        running.wait_for(lambda: result.state == "STARTED")
        before = essence(row(running, result.id))
        for _ in range(5):
            send_again()
        running.wait_for(lambda: dropped(running, result.id) == 5, message="all copies are dropped")
        running.wait_for(running.queue_is_empty)
        assert essence(row(running, result.id)) == before
        assert result.state == "STARTED"
        running.witness.saw(result.id, "go")
        assert result.get(timeout=15) == "tracked"
        assert running.witness.steps(result.id) == ["body", "go"]

    def test_while_it_sleeps_and_after_its_end(self, running: Bench) -> None:
        with copying(running) as send_again:
            result = running.project.nap.delay(3600)
        asleep = wait_until_asleep(running, result)
        meta = result.info
        for _ in range(5):
            send_again()
        send_wake_again(running, asleep, wake=1)
        running.wait_for(lambda: dropped(running, result.id) == 6, message="all copies are dropped")
        running.wait_for(running.queue_is_empty)
        assert essence(row(running, result.id)) == essence(asleep)
        assert (result.state, result.info) == ("SLEEPING", meta)

        running.app().durable.wake(result.id)
        assert result.get(timeout=20) == ["first", "second", 2]
        ended = wait_for_status(running, result.id, "succeeded")
        for _ in range(5):
            send_again()
        send_wake_again(running, asleep, wake=1)
        running.wait_for(lambda: dropped(running, result.id) == 12, message="all copies are dropped")
        running.wait_for(running.queue_is_empty)
        assert essence(row(running, result.id)) == essence(ended)
        assert result.get() == ["first", "second", 2]
        assert running.witness.steps(result.id) == ["body", "before", "body", "after", "on_success"]


@on("redis-postgres", fixture="running")
class TestSameId:
    @pytest.mark.parametrize("by_name", [False, True])
    def test_a_second_send_is_dropped_while_the_first_lives_and_runs_after_it(
        self, running: Bench, by_name: bool
    ) -> None:
        doze = running.project.doze
        own = f"of-my-own-{by_name}"
        send = partial(doze.app.send_task, doze.name) if by_name else doze.apply_async
        first = send((1, 3600), task_id=own)
        wait_until_asleep(running, first)
        send((2, 3600), task_id=own)
        running.wait_for(lambda: dropped(running, own) == 1, message="the second is dropped")
        lines = running.processes[0].logs().splitlines()
        assert [" WARNING" in line for line in lines if f"[{own}] dropped: " in line] == [True]
        running.app().durable.wake(own)
        assert first.get(timeout=15) == 1
        wait_for_status(running, own, "succeeded")

        third = send((3, 1.2), task_id=own)
        running.wait_for(lambda: running.witness.count(own, "woken") == 2)
        ended = wait_for_status(running, own, "succeeded")
        assert ended.token == 4, "tokens only grow"
        assert len(ended.journal) == 1
        assert third.id == first.id


@on("embedded-sqlite", "redis-postgres", fixture="running")
class TestWaiting:
    """Countdown and eta are rows; the broker holds nothing for them."""

    def test_a_countdown_is_a_row(self, running: Bench) -> None:
        before = datetime.now(timezone.utc)
        result = running.project.doze.apply_async((5, 0), countdown=3)
        scheduled = row(running, result.id)
        assert scheduled is not None
        assert scheduled.status == "scheduled"
        assert scheduled.wake_at is not None
        assert timedelta(seconds=2.9) < scheduled.wake_at - before < timedelta(seconds=6)
        assert running.queue_is_empty()
        assert result.state == "PENDING"
        assert result.get(timeout=15) == 5
        (body,) = running.witness.sightings(result.id, "body")
        assert body.time >= scheduled.wake_at.timestamp()

    def test_an_eta_is_a_row(self, running: Bench) -> None:
        eta = datetime.now(timezone(timedelta(hours=3))) + timedelta(seconds=3)
        result = running.project.doze.apply_async((6, 0), eta=eta)
        scheduled = row(running, result.id)
        assert scheduled is not None
        assert scheduled.wake_at is not None
        assert abs(scheduled.wake_at - eta) < timedelta(milliseconds=2)
        assert running.queue_is_empty()
        assert result.get(timeout=15) == 6

    def test_an_eta_of_a_producer_without_the_extension_is_made_a_row_by_the_worker(
        self, running: Bench
    ) -> None:
        conf = running.app().conf
        with Celery("other", set_as_current=False) as other:
            for name in ("broker_url", "broker_transport", "broker_transport_options"):
                other.conf[name] = conf[name]
            sent = other.send_task("tests.integration.proj.doze", (7, 0), countdown=4)
        scheduled = wait_for_status(running, sent.id, "scheduled")
        assert scheduled.owner is None
        running.wait_for(running.queue_is_empty, message="the worker keeps no message")
        assert running.app().AsyncResult(sent.id).get(timeout=15) == 7
        (body,) = running.witness.sightings(sent.id, "body")
        assert scheduled.wake_at is not None
        assert body.time >= scheduled.wake_at.timestamp()

    def test_an_eta_in_the_past_runs_at_once(self, running: Bench) -> None:
        eta = datetime.now(timezone.utc) - timedelta(days=1)
        assert running.project.doze.apply_async((8, 0), eta=eta).get(timeout=15) == 8

    def test_a_task_that_sleeps_does_not_expire(self, running: Bench) -> None:
        result = running.project.nap.apply_async((2,), expires=1.5)
        assert result.get(timeout=15) == ["first", "second", 2]

    def test_a_task_that_has_not_started_in_time_expires(self, running: Bench) -> None:
        result = running.project.nap.apply_async((0,), countdown=1.5, expires=0.5)
        running.wait_for(lambda: result.state == "REVOKED", message="it has expired")
        assert wait_for_status(running, result.id, "cancelled").wake_at is None
        assert running.witness.steps(result.id) == []


@on("redis-postgres", "rabbitmq-postgres", fixture="running")
class TestRetry:
    def test_a_retry_waits_as_a_row_and_keeps_the_steps(self, running: Bench) -> None:
        result = running.project.flaky.delay(3600)
        for _ in range(2):
            retrying = wait_for_status(running, result.id, "retrying")
            assert retrying.owner is None
            running.wait_for(running.queue_is_empty, message="the broker holds no message for it")
            assert result.state == "RETRY"
            running.app().durable.wake(result.id)
            # By the token: the next run may be over, and wait for its own retry, before we look again.
            running.wait_for(lambda after=retrying.token: row(running, result.id).token > after)
        assert result.get(timeout=15) == [7, 2]
        wait_for_status(running, result.id, "succeeded")
        assert running.witness.steps(result.id) == [
            "body 0",
            "step",
            "on_retry",
            "body 1",
            "on_retry",
            "body 2",
            "on_success",
        ]

    def test_the_last_retry_fails_with_the_error(self, running: Bench) -> None:
        result = running.project.hopeless.apply_async(link_error=running.project.failed.s())
        with pytest.raises(RuntimeError, match="never"):
            result.get(timeout=15)
        wait_for_status(running, result.id, "failed")
        running.wait_for(lambda: running.witness.count(result.id, "errback RuntimeError"))
        assert sorted(running.witness.steps(result.id)) == [
            "body 0",
            "body 1",
            "errback RuntimeError",
            "on_failure",
            "on_retry",
        ]

    def test_a_retry_with_other_arguments_starts_the_journal_anew(self, running: Bench) -> None:
        result = running.project.retries_with.delay(1)
        assert result.get(timeout=15) == [2]
        assert running.witness.steps(result.id) == ["step 1", "step 2"]


class TestFidelity:
    @on("redis-postgres", "rabbitmq-postgres")
    def test_a_message_comes_back_as_it_was_sent(self, bench: Bench) -> None:
        bench.configure(task_default_queue_type="classic", task_queue_max_priority=9)
        start_worker_and_beat(bench, queues="celery,side")
        result = bench.project.describe.apply_async(
            (2,),
            task_id="my-own-id",
            queue="side",
            priority=3,
            headers={"custom": "kept", "x": {"nested": [1, 2]}},
            shadow="a shadow",
            argsrepr="(hidden)",
            expires=3600,
            compression="zlib",
            serializer="json",
            soft_time_limit=50,
            time_limit=60,
            stamps={"team": "red"},
        )
        asleep = wait_until_asleep(bench, result)
        assert asleep.message is not None
        assert asleep.message.routing_key == "side"
        assert asleep.message.compression is not None
        size = len(asleep.message.headers) + len(asleep.message.body)
        before, after = result.get(timeout=20)
        assert after == before
        assert before["id"] == "my-own-id"
        assert (before["priority"], before["routing_key"]) == (3, "side")
        assert before["custom"] == ["kept", {"nested": [1, 2]}]
        assert before["shadow"] == "a shadow"
        assert before["argsrepr"] == "(hidden)"
        assert before["timelimit"] == [60, 50]
        assert "durable" not in before["headers"]
        ended = wait_for_status(bench, "my-own-id", "succeeded")
        assert ended.message is not None
        assert len(ended.message.headers) + len(ended.message.body) == size

    @on("redis-postgres")
    @pytest.mark.parametrize("serializer", ["pickle", "yaml", "msgpack"])
    def test_every_serializer_goes_through_a_sleep(self, bench: Bench, serializer: str) -> None:
        bench.configure(accept_content=["json", serializer], task_serializer=serializer)
        bench.env["C_FORCE_ROOT"] = "1"  # Celery refuses pickle to root
        start_worker_and_beat(bench)
        assert bench.project.doze.delay(3, 1.2).get(timeout=15) == 3

    @on("redis-postgres")
    def test_protocol_1_is_refused_with_a_clear_error(self, bench: Bench) -> None:
        worker = bench.worker()
        old = Celery("other", broker=bench.broker.url, set_as_current=False)
        old.conf.task_protocol = 1
        sent = old.send_task("tests.integration.proj.doze", (7, 0))
        bench.wait_for(lambda: "durable tasks need task protocol 2" in worker.logs())
        bench.wait_for(bench.queue_is_empty)
        assert status(bench, sent.id) is None
        assert bench.project.doze.delay(3, 0).get(timeout=15) == 3
        old.close()

    @on("redis-postgres")
    def test_an_id_that_no_row_can_have_is_refused_once_and_nothing_else_is(self, bench: Bench) -> None:
        worker = bench.worker()
        other = Celery("other", broker=bench.broker.url, set_as_current=False)
        marks: list[dict[str, Any]] = [{}, {HEADER: {"send_id": "s"}}]
        for mark in marks:
            for bad in ("x" * 256, "a\x00b"):
                other.send_task("tests.integration.proj.doze", (7, 0), task_id=bad, headers=mark)
        other.send_task("tests.integration.no\x00such", task_id="good", headers=marks[1])
        assert bench.project.doze.delay(3, 0).get(timeout=15) == 3
        bench.wait_for(bench.queue_is_empty)
        log = worker.logs()
        assert log.count(": ERROR/") == 5, log
        for said in ("256 characters, more than 255", "a NUL character"):
            assert log.count(said) >= 2
        # A result is told a moment before its row ends.
        bench.wait_for(lambda: list(bench.app().durable.list(status="live")) == [])
        other.close()

    @on("redis-postgres", "rabbitmq-postgres")
    def test_a_task_without_a_name_or_an_unknown_one_without_an_id_is_refused_and_the_worker_goes_on(
        self, bench: Bench
    ) -> None:
        worker = bench.worker()
        bad: list[dict[str, Any]] = [
            *({"task": task, "id": "good"} for task in (["proj"], {"name": "proj"}, 5, None, True)),
            *({"task": "no.such", "id": task_id} for task_id in (["good"], {"is": "good"}, 5, None)),
            {"task": "no.such"},
        ]
        with bench.app().producer_pool.acquire() as producer:
            for headers in bad:
                for mark in ({}, {HEADER: {"send_id": "s"}}):
                    producer.publish([[], {}, {}], headers=headers | mark, routing_key="celery")
        assert bench.project.doze.delay(3, 0).get(timeout=15) == 3
        bench.wait_for(bench.queue_is_empty)
        log = worker.logs()
        assert "CRITICAL" not in log
        refusals = ("Received and deleted unknown message", "A durable message is refused")
        assert sum(log.count(refusal) for refusal in refusals) == 2 * len(bad), log
        # A result is told a moment before its row ends.
        bench.wait_for(lambda: list(bench.app().durable.list(status="live")) == [])
