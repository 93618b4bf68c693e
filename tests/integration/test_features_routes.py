"""RabbitMQ: quorum queues behind exchanges, native delayed delivery, a broadcast, a lost connection."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from kombu.utils.json import loads

from celery_durable import ConfigurationError
from tests.integration.features_support import features_bench, requests_of, seen
from tests.integration.support import body_runs, wait_for_status, wait_until_asleep
from tests.nodes import Bench, Servers
from tests.nodes.bench import CONF_VARIABLE

# A worker that declares the 28 queues of the delayed delivery takes its time.
pytestmark = pytest.mark.timeout(180)

#: How a task is sent, by the exchange and the routing key that it arrives with.
ROUTES: dict[tuple[str, str], dict[str, str]] = {
    ("regions", "eu.orders"): {"exchange": "regions", "routing_key": "eu.orders"},
    ("lanes", "fast"): {"exchange": "lanes", "routing_key": "fast"},
    # No queue of the configuration: it is made when it is first named.
    ("", "late"): {"queue": "late"},
}


@pytest.fixture(scope="module")
def bench(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One worker and one beat for all tests of this module."""
    folder = tmp_path_factory.mktemp("routes")
    settings = {"task_default_queue_type": "quorum", "task_default_exchange_type": "topic"}
    env = {"FEATURES_ROUTES": "1"}
    with features_bench("rabbitmq-postgres", servers, folder, env=env, **settings) as bench:
        yield bench


def delayed(bench: Bench) -> int:
    """How many messages the native delayed delivery holds. The broker's figures come late for such queues."""
    with bench.app().connection_for_write() as connection:
        channel = connection.default_channel
        names = [f"celery_delayed_{bit}" for bit in range(28)]
        return sum(channel.queue_declare(name, passive=True).message_count for name in names)


class TestQuorumQueues:
    @pytest.mark.report("native-delay", "wrong-lane")
    def test_routes_are_kept_through_sleeps_a_retry_and_a_kill(self, bench: Bench) -> None:
        t = bench.project
        ten_sleeps = t.many_sleeps.delay(10)
        bench.app().control.add_consumer(
            "late", destination=[bench.processes[0].hostname], reply=True, timeout=5, limit=1
        )
        results = [
            t.everything.apply_async((1,), {"mode": "json"}, priority=3, headers={"custom": [1]}, **route)
            for route in ROUTES.values()
        ]

        def all_have_ended() -> bool:
            assert not delayed(bench)
            return all(result.ready() for result in results)

        bench.wait_for(all_have_ended, 40, "all have come to their end")
        for (exchange, key), result in zip(ROUTES, results, strict=True):
            assert result.get(timeout=40) == [1, 7]
            first, *others = requests_of(bench, result.id)
            place = first["delivery_info"]
            assert (place["exchange"], place["routing_key"], place["priority"]) == (exchange, key, 3)
            assert len(others) == 5
            for run in others:
                assert {**run, "retries": 0, "eta": None} == first
        assert ten_sleeps.get(timeout=40) == 10
        seen(bench, ten_sleeps.id, "end")

    @pytest.mark.report("native-delay")
    def test_what_came_by_native_delayed_delivery_goes_on_by_a_plain_publish(self, bench: Bench) -> None:
        nap = bench.project.nap
        result = bench.app().send_task(nap.name, (1, 600), countdown=3, queue="europe")
        bench.wait_for(lambda: delayed(bench) == 1, message="it waits with the broker")
        asleep = wait_until_asleep(bench, result)
        assert not delayed(bench)
        assert asleep.message is not None
        assert asleep.message.routing_key == "eu.#"
        assert not [name for name in loads(asleep.message.headers) if name.startswith("x-")]
        bench.app().durable.wake(result.id)
        assert result.get(timeout=20) == 1
        assert body_runs(bench, result) == 2


class TestBroadcast:
    @pytest.mark.report("native-delay")
    def test_a_durable_task_is_refused_and_a_plain_one_is_heard(self, bench: Bench) -> None:
        with pytest.raises(ConfigurationError, match="broadcast"):
            bench.project.quick.apply_async((1,), queue="everywhere")
        result = bench.project.plain.apply_async((1,), queue="everywhere")
        assert result.get(timeout=20) == 1


class TestConnectionLost:
    @pytest.mark.report("broker-reconnect", "connection-lost-mid-run")
    def test_what_runs_goes_on_and_what_was_not_claimed_comes_again_once(self, bench: Bench) -> None:
        """With both answers to `worker_cancel_long_running_tasks_on_connection_loss`."""
        broker, database = bench.proxy(bench.broker.url or ""), bench.proxy(bench.store_url)
        workers = {}
        for cancels in (True, False):
            conf = json.loads(bench.env[CONF_VARIABLE])
            conf["worker_cancel_long_running_tasks_on_connection_loss"] = cancels
            env = {
                CONF_VARIABLE: json.dumps(conf),
                "CELERY_BROKER_URL": broker.url,
                "CELERY_DURABLE_DATABASE_URL": database.url,
            }
            name = f"cancels-{cancels}"
            workers[name] = bench.worker(name=name, queues=name, env=env, wait=False)
        for worker in workers.values():
            worker.wait_until_ready()

        t = bench.project
        runners: list[Any] = [t.waits.apply_async((1,), queue=name) for name in workers]
        for result in runners:
            seen(bench, result.id, "body")
        bench.wait_for(bench.queue_is_empty)
        database.freeze()
        held: list[Any] = [t.quick.apply_async((2,), queue=name) for name in workers]
        for result, worker in zip(held, workers.values(), strict=True):
            bench.wait_for(lambda r=result, w=worker: r.id in w.logs(), message="it waits for its claim")
        broker.reset()
        for result, worker in zip(held, workers.values(), strict=True):
            bench.wait_for(
                lambda r=result, w=worker: w.logs().count(f"{r.id}] received") == 2,
                message="the broker has sent it again",
            )
        database.heal()

        for result in held:
            assert result.get(timeout=20) == 2
            wait_for_status(bench, result.id, "succeeded")
        for result in runners:
            t.did(result.id, "go")
            assert result.get(timeout=20) == 1
            assert wait_for_status(bench, result.id, "succeeded").crashes == 0
        bench.wait_for(bench.queue_is_empty)
        for result in (*held, *runners):
            assert body_runs(bench, result) == 1
        for worker in workers.values():
            assert worker.running
            worker.stop()


class TestBrokerRestarted:
    @pytest.mark.report("native-delay", "broker-reconnect")
    def test_ten_sleeps_and_ten_retries_go_through_it_in_their_own_queue(self, bench: Bench) -> None:
        route = {"exchange": "regions", "routing_key": "eu.orders"}
        result = bench.project.sleeps_and_retries.apply_async((10,), priority=3, **route)
        prerun = partial(bench.witness.count, result.id, "task_prerun")
        bench.wait_for(lambda: prerun() >= 5, message="it is on its way")
        assert not delayed(bench)
        assert bench.broker_server is not None
        bench.broker_server.kill()
        bench.broker_server.start()

        assert result.get(timeout=40) == 10
        seen(bench, result.id, "end")
        assert not delayed(bench)
        bench.wait_for(bench.queue_is_empty)
        first, *others = requests_of(bench, result.id)
        assert [run["retries"] for run in others][-1] == 10
        for run in others:
            assert {**run, "retries": 0, "eta": None} == first
