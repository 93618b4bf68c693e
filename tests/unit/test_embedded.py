"""The broker in files: the storage, kombu's channel on it, and the settings that select it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue

from celery_durable.embedded import Channel, Transport
from celery_durable.local import TRANSPORT, embedded_defaults, is_embedded
from celery_durable.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool.of_this_process(str(tmp_path / "broker"))


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[Connection]:
    with connect(tmp_path / "broker") as opened:
        yield opened


def connect(folder: Path) -> Connection:
    return Connection("filesystem://", transport=TRANSPORT, transport_options={"folder": str(folder)})


def run_in_killed_child(work: Callable[[], object]) -> None:
    """Run ``work`` in a forked process, which is then killed in the middle of things."""

    def child() -> None:
        work()
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def drain(spool: Spool, queue: str) -> list[bytes]:
    return [data for _, data in iter(lambda: spool.take(queue), None)]


class TestQueues:
    def test_messages_come_out_in_the_order_they_went_in(self, spool: Spool) -> None:
        for number in range(50):
            spool.put("q", b"%d" % number, durable=False)
        assert drain(spool, "q") == [b"%d" % number for number in range(50)]

    def test_an_empty_or_unknown_queue_gives_nothing(self, spool: Spool) -> None:
        assert spool.take("q") is None
        assert spool.size("q") == 0

    @pytest.mark.parametrize("other", ["a/b", "..", "a@b", "a.b", "*", "ä", "q.msg", "q "])
    def test_queues_of_any_name_are_kept_apart(self, spool: Spool, other: str) -> None:
        spool.put("q", b"one", durable=False)
        spool.put(other, b"two", durable=True)
        assert drain(spool, other) == [b"two"]
        assert drain(spool, "q") == [b"one"]

    def test_a_message_that_arrives_during_a_listing_comes_after_it(self, spool: Spool) -> None:
        spool.put("q", b"1", durable=False)
        spool.put("q", b"2", durable=False)
        spool.take("q")
        spool.put("q", b"3", durable=False)
        assert drain(spool, "q") == [b"2", b"3"]

    def test_a_listed_message_that_another_took_is_passed_over(self, spool: Spool, tmp_path: Path) -> None:
        for data in (b"1", b"2", b"3"):
            spool.put("q", data, durable=False)
        spool.take("q")
        (second, _) = sorted((tmp_path / "broker" / "queues" / "q").iterdir())
        second.unlink()
        assert drain(spool, "q") == [b"3"]

    def test_a_settled_message_leaves_nothing_behind(self, spool: Spool, tmp_path: Path) -> None:
        spool.put("q", b"x", durable=True)
        tag, _ = taken(spool)
        spool.settle(tag)
        assert list(tmp_path.rglob("*.msg")) == []
        assert list((tmp_path / "broker" / "new").iterdir()) == []

    def test_a_message_given_back_is_the_oldest_of_the_next_listing(self, spool: Spool) -> None:
        for data in (b"1", b"2"):
            spool.put("q", data, durable=False)
        tag, _ = taken(spool)
        spool.give_back(tag)
        assert taken(spool)[1] == b"2"
        spool.put("q", b"3", durable=False)
        assert drain(spool, "q") == [b"1", b"3"]

    def test_what_was_settled_cannot_be_given_back(self, spool: Spool) -> None:
        spool.put("q", b"1", durable=False)
        tag, _ = taken(spool)
        spool.settle(tag)
        spool.give_back(tag)
        assert spool.size("q") == 0

    def test_a_message_that_cannot_be_written_leaves_nothing_behind(
        self, spool: Spool, tmp_path: Path
    ) -> None:
        with pytest.raises(OSError, match="too long"):
            spool.put("q" * 300, b"x", durable=False)
        assert list((tmp_path / "broker" / "new").iterdir()) == []

    def test_purge_counts_what_waits_and_spares_what_is_taken(self, spool: Spool) -> None:
        for _ in range(3):
            spool.put("q", b"x", durable=False)
        tag, _ = taken(spool)
        assert spool.purge("q") == 2
        spool.give_back(tag)
        assert spool.size("q") == 1

    def test_threads_that_share_a_queue_take_each_message_once(self, spool: Spool) -> None:
        for number in range(300):
            spool.put("q", b"%d" % number, durable=False)
        found: list[bytes] = []
        run_in_threads(4, lambda: found.extend(drain(spool, "q")))
        assert sorted(found) == sorted(b"%d" % number for number in range(300))

    def test_a_removed_folder_is_made_anew(self, spool: Spool, tmp_path: Path) -> None:
        spool.put("q", b"1", durable=False)
        taken(spool)
        shutil.rmtree(tmp_path / "broker")
        spool.sweep()
        spool.put("q", b"2", durable=True)
        assert taken(spool)[1] == b"2"


class TestBindings:
    def test_a_binding_is_kept_once(self, spool: Spool) -> None:
        spool.bind("e", ["key", "", "q"])
        spool.bind("e", ["key", "", "q"])
        assert spool.bindings("e") == [["key", "", "q"]]

    def test_an_unknown_exchange_has_none(self, spool: Spool) -> None:
        assert spool.bindings("e") == []

    def test_none_is_lost_when_many_bind_at_once(self, spool: Spool) -> None:
        keys = iter(range(40))

        def bind_ten() -> None:
            for key in itertools.islice(keys, 10):
                spool.bind("e", [str(key), "", "q"])

        run_in_threads(4, bind_ten)
        assert {row[0] for row in spool.bindings("e")} == {str(key) for key in range(40)}

    def test_a_deleted_queue_is_bound_nowhere(self, spool: Spool) -> None:
        spool.bind("e", ["", "", "q"])
        spool.bind("e", ["", "", "other"])
        spool.bind("f/g", ["", "", "q"])
        spool.put("q", b"x", durable=False)
        spool.delete("q")
        assert spool.size("q") == 0
        assert spool.bindings("e") == [["", "", "other"]]
        assert spool.bindings("f/g") == []


class TestDeadProcesses:
    def test_what_a_killed_process_had_taken_is_given_back(self, spool: Spool) -> None:
        for data in (b"1", b"2", b"3"):
            spool.put("q", data, durable=False)
        run_in_killed_child(lambda: (child_of(spool).take("q"), child_of(spool).take("q")))
        spool.sweep()
        assert drain(spool, "q") == [b"1", b"2", b"3"]

    def test_nothing_stays_of_a_dead_process(self, spool: Spool, tmp_path: Path) -> None:
        spool.put("q", b"1", durable=False)
        run_in_killed_child(lambda: child_of(spool).take("q"))
        spool.sweep()
        assert list((tmp_path / "broker" / "taken").iterdir()) == []

    def test_a_process_that_died_before_it_had_its_lock_is_dead(self, spool: Spool, tmp_path: Path) -> None:
        (tmp_path / "broker" / "taken" / "1-x").mkdir(parents=True)
        spool.sweep()
        assert list((tmp_path / "broker" / "taken").iterdir()) == []

    def test_the_own_messages_are_not_given_back(self, spool: Spool) -> None:
        spool.put("q", b"1", durable=False)
        taken(spool)
        spool.sweep()
        assert spool.size("q") == 0

    def test_one_sweep_serves_for_a_while(self, spool: Spool) -> None:
        spool.put("q", b"1", durable=False)
        spool.sweep()
        run_in_killed_child(lambda: child_of(spool).take("q"))
        spool.sweep()
        assert spool.size("q") == 0

    def test_a_child_neither_settles_nor_gives_back_what_its_parent_took(self, spool: Spool) -> None:
        spool.put("q", b"1", durable=False)
        tag, _ = taken(spool)

        def meddle() -> None:
            child_of(spool).settle(tag)
            child_of(spool).give_back(tag)

        run_in_killed_child(meddle)
        assert spool.size("q") == 0
        spool.give_back(tag)
        assert spool.size("q") == 1

    def test_the_lock_survives_children_that_come_and_go(self, spool: Spool) -> None:
        spool.put("q", b"1", durable=False)
        taken(spool)
        run_in_killed_child(lambda: None)
        run_in_killed_child(lambda: child_of(spool).sweep())
        assert spool.size("q") == 0

    def test_a_queue_ends_with_the_process_that_it_is_tied_to(self, spool: Spool, tmp_path: Path) -> None:
        spool.bind("e", ["", "", "q/1"])
        spool.put("q/1", b"1", durable=False)
        spool.put("q/1", b"2", durable=False)

        def tie_and_take() -> None:
            child_of(spool).tie("q/1")
            child_of(spool).take("q/1")

        run_in_killed_child(tie_and_take)
        spool.sweep()
        assert spool.size("q/1") == 0
        assert spool.bindings("e") == []
        assert list((tmp_path / "broker" / "queues").iterdir()) == []

    def test_a_queue_lives_on_while_one_process_is_tied_to_it(self, spool: Spool) -> None:
        spool.bind("e", ["", "", "q"])
        spool.tie("q")
        run_in_killed_child(lambda: child_of(spool).tie("q"))
        spool.sweep()
        assert spool.bindings("e") == [["", "", "q"]]

    def test_all_spellings_of_a_path_are_one_spool(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
        assert Spool.of_this_process(str(tmp_path / "link" / "b")) is Spool.of_this_process(f"{tmp_path}/./b")


class TestChannel:
    def test_an_acknowledged_message_is_gone(self, connection: Connection, tmp_path: Path) -> None:
        send(connection, "hello")
        message = get(connection)
        assert message.payload == "hello"
        message.ack()
        assert list(tmp_path.rglob("*.msg")) == []

    def test_a_message_stays_on_the_disk_until_it_is_acknowledged(
        self, connection: Connection, tmp_path: Path
    ) -> None:
        send(connection, "hello")
        get(connection)
        assert len(list(tmp_path.rglob("*.msg"))) == 1

    def test_a_rejected_message_is_gone(self, connection: Connection, tmp_path: Path) -> None:
        send(connection, "hello")
        get(connection).reject()
        assert list(tmp_path.rglob("*.msg")) == []

    def test_a_requeued_message_comes_again(self, connection: Connection) -> None:
        send(connection, "hello")
        get(connection).requeue()
        assert get(connection).payload == "hello"

    def test_a_closed_channel_gives_back_what_was_not_acknowledged(
        self, connection: Connection, tmp_path: Path
    ) -> None:
        send(connection, "1", "2", "3")
        get(connection).ack()
        get(connection)
        connection.close()
        with connect(tmp_path / "broker") as again:
            assert {get(again).payload, get(again).payload} == {"2", "3"}

    def test_recover_gives_back_what_was_not_acknowledged(self, connection: Connection) -> None:
        send(connection, "1")
        get(connection)
        channel(connection).basic_recover(requeue=True)
        assert get(connection).payload == "1"

    @pytest.mark.parametrize("way", ["get", "consume"])
    def test_a_message_taken_without_acknowledgement_is_gone(
        self, connection: Connection, tmp_path: Path, way: str
    ) -> None:
        send(connection, "hello")
        received: list[Any] = []
        if way == "get":
            received.append(bound_queue(connection).get(no_ack=True))
        else:
            queue = bound_queue(connection)
            with connection.Consumer(queue, no_ack=True, on_message=received.append):
                connection.drain_events(timeout=1)
        assert [message.payload for message in received] == ["hello"]
        assert list(tmp_path.rglob("*.msg")) == []

    def test_a_consumer_gets_no_more_than_its_prefetch(self, connection: Connection) -> None:
        send(connection, "1", "2", "3")
        received: list[Any] = []
        consumer = connection.Consumer(bound_queue(connection), on_message=received.append)
        consumer.qos(prefetch_count=2)
        with consumer:
            for _ in range(2):
                connection.drain_events(timeout=1)
            with pytest.raises(TimeoutError):
                connection.drain_events(timeout=0.01)
            received[0].ack()
            connection.drain_events(timeout=1)
        assert [message.payload for message in received] == ["1", "2", "3"]

    @pytest.mark.parametrize(
        ("kind", "key", "sent_to", "reached"),
        [
            ("direct", "a", "a", True),
            ("direct", "a", "b", False),
            ("topic", "a.*", "a.b", True),
            ("topic", "a.*", "b.a", False),
            ("fanout", "", "anything", True),
        ],
    )
    def test_exchanges_route(
        self, connection: Connection, kind: str, key: str, sent_to: str, *, reached: bool
    ) -> None:
        exchange = Exchange("x", type=kind)
        queues = [
            Queue(name, exchange, routing_key=key)(connection.default_channel) for name in ("one", "two")
        ]
        for queue in queues:
            queue.declare()
        connection.Producer().publish("hello", exchange=exchange, routing_key=sent_to)
        assert [queue.get() is not None for queue in queues] == [reached, reached]

    def test_copies_of_one_message_are_acknowledged_one_by_one(self, connection: Connection) -> None:
        exchange = Exchange("x", type="fanout")
        one, two = (Queue(name, exchange)(connection.default_channel) for name in ("one", "two"))
        for queue in (one, two):
            queue.declare()
        connection.Producer().publish("hello", exchange=exchange)
        first, second = one.get(), two.get()
        assert first is not None
        assert second is not None
        first.ack()
        second.requeue()
        assert one.get() is None
        assert two.get() is not None

    def test_a_message_that_cannot_be_read_is_set_aside(
        self, connection: Connection, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        send(connection, "broken", "whole")
        broken = min((tmp_path / "broker" / "queues" / "q").iterdir())
        broken.write_bytes(b"")
        assert get(connection).payload == "whole"
        (kept,) = (tmp_path / "broker" / "unreadable").iterdir()
        assert str(kept) in caplog.text

    def test_only_messages_that_must_survive_a_power_cut_wait_for_the_disk(
        self, connection: Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bound_queue(connection)
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", synced.append)
        connection.Producer().publish("event", routing_key="q", delivery_mode=1)
        assert synced == []
        connection.Producer().publish("task", routing_key="q", delivery_mode=2)
        assert len(synced) == 2

    def test_a_transient_queue_ends_with_the_process_that_consumes_it(
        self, spool: Spool, tmp_path: Path
    ) -> None:
        exchange = Exchange("x", type="fanout")

        def listen() -> None:
            child = connect(tmp_path / "broker")
            Queue("mine", exchange, auto_delete=True)(child.default_channel).declare()
            child.Consumer(Queue("mine", exchange, auto_delete=True)).consume()
            Queue("shared", exchange)(child.default_channel).declare()
            child.Consumer(Queue("shared", exchange)).consume()

        run_in_killed_child(listen)
        assert {row[2] for row in spool.bindings("x")} == {"mine", "shared"}
        spool.sweep()
        assert {row[2] for row in spool.bindings("x")} == {"shared"}

    def test_a_transient_queue_outlives_a_producer_that_only_declares_it(
        self, spool: Spool, tmp_path: Path
    ) -> None:
        queue = Queue("mine", Exchange("x"), routing_key="k", auto_delete=True)

        def declare_and_send() -> None:
            child = connect(tmp_path / "broker")
            child.Producer().publish("hello", exchange="x", routing_key="k", declare=[queue])

        run_in_killed_child(declare_and_send)
        spool.sweep()
        assert spool.size("mine") == 1

    def test_a_deleted_reply_queue_leaves_nothing_behind(
        self, connection: Connection, tmp_path: Path
    ) -> None:
        queue = Queue("reply", Exchange("x"), routing_key="k", auto_delete=True)
        with connection.Consumer(queue, no_ack=True, on_message=lambda message: None):
            connection.default_channel.after_reply_message_received("reply")
        assert list(tmp_path.rglob("reply*")) == []

    def test_folders_in_one_process_know_nothing_of_each_other(self, tmp_path: Path) -> None:
        for folder in ("a", "b"):
            with connect(tmp_path / folder) as connection:
                send(connection, folder)
                assert get(connection).payload == folder
                assert get_or_none(connection) is None

    def test_an_error_of_the_disk_is_one_that_celery_tries_again(self) -> None:
        assert issubclass(OSError, Transport.connection_errors)


class TestSettings:
    def test_the_defaults_select_this_transport(self, tmp_path: Path) -> None:
        app = embedded_app(tmp_path)
        with app.connection_for_write() as connection:
            assert isinstance(connection.default_channel, Channel)
            send(connection, "hello")
        assert (tmp_path / "celery-durable-broker").is_dir()

    def test_nothing_is_created_before_the_first_use(self, tmp_path: Path) -> None:
        app = embedded_app(tmp_path)
        shown = app.connection_for_write().as_uri()
        assert shown == f"filesystem://{tmp_path}/celery-durable-broker"
        assert list(tmp_path.iterdir()) == []

    def test_results_are_kept_beside_the_broker(self, tmp_path: Path) -> None:
        app = embedded_app(tmp_path)
        app.backend.store_result("id", 42, "SUCCESS")
        assert app.AsyncResult("id").get(timeout=1) == 42
        assert (tmp_path / "celery-durable-results.db").is_file()

    def test_every_path_is_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert embedded_defaults(Path()) == embedded_defaults(tmp_path.resolve())

    def test_the_embedded_broker_is_recognised(self, tmp_path: Path) -> None:
        assert is_embedded(embedded_app(tmp_path).conf)
        assert not is_embedded(Celery("other", broker="redis://", set_as_current=False).conf)
        assert not is_embedded(Celery("other", set_as_current=False).conf)


def embedded_app(folder: Path) -> Celery:
    app = Celery("embedded", set_as_current=False)
    app.conf.update(embedded_defaults(folder))
    return app


def child_of(spool: Spool) -> Spool:
    return Spool.of_this_process(str(spool._root))


def taken(spool: Spool) -> tuple[str, bytes]:
    message = spool.take("q")
    assert message is not None
    return message


def run_in_threads(count: int, work: Callable[[], object]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def channel(connection: Connection) -> Any:
    return connection.default_channel


def bound_queue(connection: Connection) -> Any:
    queue = Queue("q", Exchange(""), routing_key="q")(connection.default_channel)
    queue.declare()
    return queue


def send(connection: Connection, *payloads: str) -> None:
    for payload in payloads:
        connection.Producer().publish(payload, routing_key="q")


def get_or_none(connection: Connection) -> Any:
    return bound_queue(connection).get()


def get(connection: Connection) -> Any:
    message = get_or_none(connection)
    assert message is not None
    return message
