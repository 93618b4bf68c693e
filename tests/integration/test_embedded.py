"""The embedded broker among real processes: producers, consumers and workers that are killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from kombu import Connection
from kombu.simple import SimpleQueue

from celery_durable.local import TRANSPORT
from celery_durable.spool import Spool
from tests.nodes import Bench, on, tree, wait_for

QUEUE = "numbers"
LARGE = "x" * 200_000


@pytest.fixture
def bench_module() -> str:
    return "tests.nodes.sample"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "broker"


@pytest.fixture
def fork() -> Iterator[Callable[..., BaseProcess]]:
    """Starts a function in a forked process, which is gone after the test."""
    context = multiprocessing.get_context("fork")
    started: list[BaseProcess] = []

    def start(work: Callable[..., object], *args: object) -> BaseProcess:
        process = context.Process(target=work, args=args)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()


def numbers(folder: Path) -> SimpleQueue:
    connection = Connection(
        "filesystem://",
        transport=TRANSPORT,
        transport_options={"folder": str(folder), "polling_interval": 0.01},
    )
    return connection.SimpleQueue(QUEUE)


def produce(folder: Path, first: int, count: int) -> None:
    queue = numbers(folder)
    for number in range(first, first + count):
        queue.put({"number": number, "ballast": LARGE if number % 10 == 0 else ""})


def consume(folder: Path, record: Path) -> None:
    """Write down each number, then acknowledge it; forever."""
    queue = numbers(folder)
    with record.open("a", buffering=1) as lines:
        while True:
            message = queue.get(block=True)
            lines.write(f"{message.payload['number']}\n")
            message.ack()


def hold(folder: Path, count: int, held: Path) -> None:
    """Take messages and keep them, with a child that outlives this process."""
    queue = numbers(folder)
    queue.consumer.qos(prefetch_count=count)
    taken = [queue.get(block=True) for _ in range(count)]
    if os.fork() == 0:
        held.write_text(f"{len(taken)} {os.getpid()}")
    time.sleep(60)


def recorded(*records: Path) -> Counter[int]:
    lines = [line for path in records if path.exists() for line in path.read_text().split()]
    return Counter(int(line) for line in lines if line.isdigit())


def everything(folder: Path) -> list[Path]:
    return list(folder.rglob("*.msg"))


class TestManyProcesses:
    def test_two_producers_and_two_consumers_lose_and_double_nothing(
        self, folder: Path, tmp_path: Path, fork: Callable[..., BaseProcess]
    ) -> None:
        records = [tmp_path / "a", tmp_path / "b"]
        for record in records:
            fork(consume, folder, record)
        producers = [fork(produce, folder, first, 1000) for first in (0, 1000)]
        for producer in producers:
            producer.join()
        wait_for(lambda: not everything(folder), timeout=50, message="all is acknowledged")
        assert recorded(*records) == Counter(range(2000))

    def test_the_numbers_of_one_producer_keep_their_order(
        self, folder: Path, tmp_path: Path, fork: Callable[..., BaseProcess]
    ) -> None:
        produce(folder, 0, 300)
        fork(consume, folder, tmp_path / "a")
        wait_for(lambda: len(recorded(tmp_path / "a")) == 300)
        assert (tmp_path / "a").read_text().split() == [str(number) for number in range(300)]

    def test_consumers_killed_at_any_moment_lose_nothing(
        self, folder: Path, tmp_path: Path, fork: Callable[..., BaseProcess]
    ) -> None:
        record = tmp_path / "a"
        chance = random.Random(7)
        produce(folder, 0, 400)
        for _ in range(15):
            doomed = fork(consume, folder, record)
            time.sleep(chance.uniform(0.0, 0.06))
            doomed.kill()
            doomed.join()
        fork(consume, folder, record)
        wait_for(lambda: not everything(folder), timeout=50, message="all is acknowledged")
        assert set(recorded(record)) == set(range(400))

    def test_producers_killed_at_any_moment_leave_no_broken_message(
        self, folder: Path, tmp_path: Path, fork: Callable[..., BaseProcess]
    ) -> None:
        fork(consume, folder, tmp_path / "a")
        chance = random.Random(11)
        for run in range(10):
            doomed = fork(produce, folder, run * 10_000, 10_000)
            time.sleep(chance.uniform(0.02, 0.1))
            doomed.kill()
            doomed.join()
        wait_for(lambda: not everything(folder), timeout=50, message="all is acknowledged")
        runs = recorded(tmp_path / "a")
        assert set(runs.values()) == {1}
        assert not (folder / "unreadable").exists()

    def test_what_a_killed_process_held_comes_back_while_its_children_live(
        self, folder: Path, tmp_path: Path, fork: Callable[..., BaseProcess]
    ) -> None:
        held = tmp_path / "held"
        produce(folder, 0, 5)
        holder = fork(hold, folder, 5, held)
        count, child = map(int, wait_for(lambda: held.read_text() if held.exists() else "").split())
        assert count == 5
        try:
            spool = Spool(folder)
            spool.sweep()
            assert spool.size(QUEUE) == 0
            holder.kill()
            holder.join()
            assert tree.is_alive(child)
            Spool(folder).sweep()
            assert spool.size(QUEUE) == 5
        finally:
            os.kill(child, signal.SIGKILL)

    def test_a_frozen_process_keeps_what_it_holds(
        self, folder: Path, tmp_path: Path, fork: Callable[..., BaseProcess]
    ) -> None:
        held = tmp_path / "held"
        produce(folder, 0, 5)
        holder = fork(hold, folder, 5, held)
        _, child = map(int, wait_for(lambda: held.read_text() if held.exists() else "").split())
        try:
            assert holder.pid is not None
            tree.freeze(holder.pid)
            Spool(folder).sweep()
            assert Spool(folder).size(QUEUE) == 0
        finally:
            os.kill(child, signal.SIGKILL)


@on("embedded-sqlite")
class TestWorkers:
    @pytest.mark.timeout(120)
    def test_five_hundred_tasks_run_once_each(self, bench: Bench) -> None:
        sample = bench.project
        sent = [sample.slow.delay(0) for _ in range(500)]
        bench.worker()
        bench.worker(name="other")
        bench.wait_for(bench.queue_is_empty, timeout=100)
        ends = Counter(seen.task_id for seen in bench.witness.sightings(step="end"))
        assert ends == Counter(result.id for result in sent)
        assert [result.get(timeout=10) for result in sent] == ["done"] * 500

    @pytest.mark.timeout(120)
    def test_a_killed_worker_loses_none_of_its_tasks(self, bench: Bench) -> None:
        bench.configure(task_ignore_result=True)
        sample = bench.project
        sent = {sample.slow.delay(0).id for _ in range(500)}
        worker = bench.worker()
        bench.wait_for(lambda: bench.witness.count(step="end") >= 50)
        worker.kill()
        assert bench.broker.messages().unacknowledged > 0
        worker.start()
        bench.wait_for(bench.queue_is_empty, timeout=100)
        ends = Counter(seen.task_id for seen in bench.witness.sightings(step="end"))
        assert set(ends) == sent
        # What was finished and not yet acknowledged runs again; that is no more than was prefetched.
        assert sum(ends.values()) <= 500 + 10

    def test_tasks_of_a_killed_main_process_run_elsewhere(self, bench: Bench) -> None:
        """On Linux its pool dies with it, some milliseconds later."""
        sample = bench.project
        busy = [sample.slow.delay(60) for _ in range(2)]
        prefetched = [sample.add.delay(1, number) for number in range(4)]
        worker = bench.worker()
        bench.wait_for(lambda: bench.witness.count(step="start") == 2)
        bench.wait_for(lambda: bench.broker.messages().unacknowledged == 6)
        worker.signal(signal.SIGKILL)
        worker.wait()
        bench.worker(name="other")
        assert [result.get(timeout=15) for result in prefetched] == [1, 2, 3, 4]
        assert [result.get(timeout=15) for result in busy] == ["done", "done"]

    def test_a_warm_shutdown_gives_back_what_was_prefetched(self, bench: Bench) -> None:
        sample = bench.project
        sent = [sample.slow.delay(1) for _ in range(6)]
        worker = bench.worker()
        bench.wait_for(lambda: bench.witness.count(step="start") == 2)
        worker.stop()
        assert bench.witness.count(step="end") == 2
        assert bench.broker.messages() == (4, 0)
        worker.start()
        assert [result.get(timeout=15) for result in sent] == ["done"] * 6
        assert bench.witness.count(step="end") == 6

    def test_remote_control_reaches_every_worker(self, bench: Bench) -> None:
        control = bench.app().control
        workers = [bench.worker(), bench.worker(name="other")]
        names = {worker.hostname for worker in workers}
        pongs = control.ping(timeout=5, limit=2) or []
        assert {name for pong in pongs for name in pong} == names
        assert set(control.inspect(timeout=5, limit=2).registered() or {}) == names
        assert set(control.inspect(list(names)[:1], timeout=5).active() or {}) == set(list(names)[:1])

    def test_remote_control_is_answered_while_the_whole_pool_is_busy(self, bench: Bench) -> None:
        sample = bench.project
        worker = bench.worker()
        busy = [sample.slow.delay(60) for _ in range(3)]
        bench.wait_for(lambda: bench.witness.count(step="start") == 2)
        bench.wait_for(lambda: bench.broker.messages() == (0, 3))
        assert bench.app().control.ping(timeout=5, limit=1) == [{worker.hostname: {"ok": "pong"}}]
        for task in busy:
            task.revoke(terminate=True, signal="SIGKILL")
        bench.wait_for(lambda: [task.state for task in busy] == ["REVOKED"] * 3)

    def test_a_revoked_task_does_not_run(self, bench: Bench) -> None:
        sample = bench.project
        bench.worker(concurrency=1)
        first = sample.slow.delay(2)
        second = sample.slow.delay(0)
        bench.wait_for(lambda: bench.broker.messages() == (0, 2))
        second.revoke()
        first.get(timeout=15)
        bench.wait_for(lambda: second.state == "REVOKED")
        assert bench.witness.count(second.id) == 0

    def test_a_running_task_can_be_terminated(self, bench: Bench) -> None:
        sample = bench.project
        bench.worker()
        task = sample.slow.delay(60)
        bench.wait_for(lambda: bench.witness.count(task.id, "start") == 1)
        task.revoke(terminate=True, signal="SIGKILL")
        bench.wait_for(lambda: task.state == "REVOKED")
        bench.wait_for(bench.queue_is_empty)
        assert bench.witness.count(task.id, "end") == 0

    def test_remote_control_of_dead_workers_leaves_nothing_behind(self, bench: Bench) -> None:
        control = bench.app().control
        for _ in range(2):
            doomed = bench.worker(name="doomed")
            assert control.ping(timeout=5, limit=1)
            doomed.kill()
            control.broadcast("heartbeat")
        bench.worker(name="last")
        broker = bench.folder / "celery-durable-broker"
        bench.wait_for(lambda: not list(broker.glob("queues/doomed*")))
        assert "doomed" not in (broker / "exchanges" / "celery.pidbox.json").read_text()

    @pytest.mark.parametrize("pool", ["solo", "threads", "gevent"])
    def test_every_pool_works_and_listens(self, bench: Bench, pool: str) -> None:
        worker = bench.worker(pool=pool)
        sent = [bench.project.add.delay(number, 1) for number in range(20)]
        assert [result.get(timeout=15) for result in sent] == list(range(1, 21))
        assert bench.app().control.ping(timeout=5, limit=1) == [{worker.hostname: {"ok": "pong"}}]
        worker.stop()
        assert bench.queue_is_empty()

    def test_each_tick_of_beat_runs_once(self, bench: Bench) -> None:
        bench.worker()
        beat = bench.beat()
        bench.wait_for(lambda: bench.witness.count("tick") >= 10)
        beat.stop()
        bench.wait_for(bench.queue_is_empty)
        assert bench.witness.count("tick") == beat.logs().count("Sending due task tick")

    def test_workers_that_start_at_once_share_new_files(self, bench: Bench) -> None:
        sample = bench.project
        sent = [sample.add.delay(number, 1) for number in range(40)]
        workers = [bench.worker(name=name, wait=False) for name in ("a", "b", "c")]
        for worker in workers:
            worker.wait_until_ready()
        assert [result.get(timeout=15) for result in sent] == list(range(1, 41))
        for worker in workers:
            assert "Traceback" not in worker.logs()

    def test_an_idle_worker_uses_almost_no_processor_time(self, bench: Bench) -> None:
        worker = bench.worker()
        bench.project.add.delay(1, 1).get(timeout=15)
        before = processor_seconds(worker.tree())
        time.sleep(3)
        assert processor_seconds(worker.tree()) - before < 0.3


def processor_seconds(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
