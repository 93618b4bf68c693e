"""Connections: over forks, for many processes at once, and when the database does not answer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import threading
import traceback
from contextlib import suppress

import psycopg
import pytest
from sqlalchemy import NullPool, exc, make_url, select, text

from celery_durable.errors import LoginRefused, StoreUnavailable, WrongTables
from celery_durable.records import Claim
from celery_durable.store import Store, forks
from celery_durable.store.engine import Database
from celery_durable.store.forks import gate
from tests.nodes import FaultProxy, WaitTimeout, wait_for
from tests.nodes.ports import free_port
from tests.store.tables import Tables, claimed, delivery

fork = multiprocessing.get_context("fork")


def in_child(work):
    """Run `work` in a forked process; what it returns, or the error that it raised."""
    mine, theirs = fork.Pipe()

    def child():
        try:
            theirs.send((work(), None))
        except BaseException:  # noqa: BLE001 - the parent raises it
            theirs.send((None, traceback.format_exc()))
        finally:
            os._exit(0)

    process = fork.Process(target=child)
    process.start()
    assert mine.poll(30), "the child hangs"
    value, error = mine.recv()
    process.join(10)
    assert error is None, error
    return value


def server_process(store):
    """Which process of the server answers us."""
    with store.database.statements() as connection:
        return connection.execute(text("SELECT pg_backend_pid()")).scalar_one()


# -- forks -----------------------------------------------------------------------------------------


def test_a_child_that_is_forked_while_a_thread_of_its_parent_is_writing_can_write(store):
    entered = threading.Event()

    def write_until_somebody_forks():
        with store.database.transaction() as connection:
            connection.execute(text("DELETE FROM durable_journal"))
            entered.set()
            # PostgreSQL has its locks in the server: there a fork waits for nobody.
            with suppress(WaitTimeout):
                wait_for(lambda: gate.is_closed, timeout=1)

    writer = threading.Thread(target=write_until_somebody_forks)
    writer.start()
    assert entered.wait(10)

    assert in_child(lambda: claimed(store, delivery("child")).key.token) == 1
    writer.join(10)
    assert claimed(store, delivery("parent")).key.token == 1


def test_a_child_uses_the_store_that_its_parent_has_used_and_both_go_on(store, tables):
    claimed(store, delivery("before"))

    in_child(lambda: claimed(store, delivery("child")).key.token)
    claimed(store, delivery("after"))

    assert [row["task_id"] for row in tables.all()] == ["after", "before", "child"]


@pytest.mark.report("forked-connection")
def test_a_child_has_connections_of_its_own(postgres_url):
    store = Store(postgres_url, namespace="proj")
    before = server_process(store)

    in_child_of_child = in_child(lambda: (server_process(store), in_child(lambda: server_process(store))))

    assert server_process(store) == before
    assert len({before, *in_child_of_child}) == 3
    store.dispose()


@pytest.mark.report("forked-connection")
def test_a_fork_in_the_middle_of_a_transaction_leaves_it_to_the_parent(store, tables):
    table = store.context.schema.executions
    with store.database.transaction() as connection:
        connection.execute(select(table))
        pid = in_child(os.getpid)  # it ends here, with the transaction in its memory
        connection.execute(text("SELECT 1"))

    assert pid != os.getpid()
    claimed(store)
    assert len(tables.all()) == 1


@pytest.mark.report("forked-connection")
def test_a_child_that_closes_its_connections_leaves_those_of_its_parent_open(store):
    claimed(store, delivery("before"))
    connections = store.database.engine.pool.checkedin()
    in_child(lambda: (store.now(), store.dispose(), store.now())[0])

    # With SQLite the parent has closed them itself.
    assert store.database.engine.pool.checkedin() == (0 if store.database.is_sqlite else connections)
    claimed(store, delivery("after"))


@pytest.mark.report("forked-connection")
def test_what_a_child_writes_outlives_the_connections_that_its_parent_had_at_the_fork(store, tables):
    """In SQLite's tables the child's connection would share the lock of its parent's, and have none: whoever
    closes next deletes the log that the child writes to."""
    claimed(store, delivery("before"))
    mine, theirs = fork.Pipe()

    def child():
        claimed(store, delivery("first"))
        theirs.send("has written")
        theirs.recv()
        claimed(store, delivery("second"))
        theirs.send("has written again")
        theirs.recv()
        os._exit(0)

    process = fork.Process(target=child)
    process.start()
    assert mine.poll(30)
    mine.recv()
    store.dispose()
    mine.send("go on")
    assert mine.poll(30)

    found = [row["task_id"] for row in tables.all()]
    process.kill()
    process.join()
    assert found == ["before", "first", "second"]


def test_a_child_forked_while_another_thread_is_connecting_does_not_hang(store):
    stop = threading.Event()
    threads = [threading.Thread(target=lambda: _use(store, stop)) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            assert in_child(store.now)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _use(store, stop):
    while not stop.is_set():
        store.now()


def test_threads_that_come_first_together_share_one_engine(store):
    barrier = threading.Barrier(8)
    engines = []

    def work():
        barrier.wait()
        engines.append(store.database.engine)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(engines) == 8
    assert len({id(engine) for engine in engines}) == 1


# -- how many, and which ---------------------------------------------------------------------------


@pytest.mark.report("connections-per-task")
def test_the_connections_of_a_process_are_bounded(postgres_url):
    store = Store(postgres_url, namespace="proj")
    open_at_once = []

    def work():
        with store.database.transaction() as connection:
            connection.execute(text("SELECT pg_sleep(0.02)"))
            found = connection.execute(
                text(
                    "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'celery_durable'"
                    " AND datname = current_database()"
                )
            )
            open_at_once.append(found.scalar_one())

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(open_at_once) == 20
    assert max(open_at_once) == 4
    store.dispose()


def test_heartbeats_have_a_connection_of_their_own(store):
    key = claimed(store).key
    held = [store.database.engine.connect() for _ in range(4)]  # tasks use all that there are

    assert store.heartbeats.renew([key], 60.0) == {key}
    for connection in held:
        connection.close()


def test_the_user_s_engine_options_win(store_url):
    store = Store(store_url, namespace="proj", engine_options={"pool_size": 2, "pool_timeout": 0.01})
    held = [store.database.engine.connect() for _ in range(2)]

    with pytest.raises(StoreUnavailable, match="QueuePool limit of size 2"):
        store.now()
    for connection in held:
        connection.close()
    store.dispose()


@pytest.mark.report("forked-connection")
def test_another_kind_of_pool_works(store_url):
    store = Store(store_url, namespace="proj", engine_options={"poolclass": NullPool})
    key = claimed(store).key

    assert store.heartbeats.renew([key], 60.0) == {key}
    store.dispose()


@pytest.mark.parametrize(("timeout", "shown"), [(None, "0"), (2.5, "2500ms")])
def test_connect_arguments_of_the_user_are_added_to_ours(postgres_url, timeout, shown):
    arguments = {"application_name": "mine", "options": "-c work_mem=1234kB"}
    database = Database(postgres_url, {"connect_args": arguments}, statement_timeout=timeout)

    with database.statements() as connection:
        found = [
            connection.execute(text(f"SHOW {name}")).scalar_one()
            for name in ("application_name", "work_mem", "timezone", "statement_timeout")
        ]
    database.dispose()

    assert found == ["mine", "1234kB", "UTC", shown]


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///file::memory:?cache=shared&uri=true"])
def test_a_database_in_memory_outlives_a_fork(url):
    store = Store(url, namespace="proj")
    store.upgrade()
    claimed(store)

    in_child(os.getpid)

    assert len(Tables(store).all()) == 1
    store.dispose()


def test_a_fork_that_waits_no_longer_for_a_thread_closes_nothing(sqlite_url, monkeypatch):
    """What is open stays so, and the thread finds its connection as it was."""
    monkeypatch.setattr(forks, "PATIENCE", 0.0)
    store = Store(sqlite_url, namespace="proj")
    with store.database.statements():
        pool = store.database.engine.pool
        closing = threading.Thread(target=gate.close)
        closing.start()
        closing.join(10)
        gate.open()
        assert store.database.engine.pool is pool
    store.dispose()


def test_a_database_in_memory_is_one_for_all_threads():
    store = Store("sqlite://", namespace="proj")
    store.upgrade()
    answers = []

    def work(number):
        for _ in range(10):
            answers.append(store.claims.claim(delivery(f"task-{number % 5}"), "owner", 60.0, 3))
            store.heartbeats.renew([], 60.0)

    threads = [threading.Thread(target=work, args=[number]) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(answers) == 100
    assert sum(isinstance(answer, Claim) for answer in answers) == 5


# -- SQLite ----------------------------------------------------------------------------------------


def test_a_file_is_in_wal_mode_and_every_commit_is_on_the_disk(sqlite_url):
    store = Store(sqlite_url, namespace="proj")
    with store.database.statements() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar_one() == 2  # FULL
    store.dispose()


def test_reading_does_not_wait_for_the_writer(sqlite_url, tables):
    store = Store(sqlite_url, namespace="proj")
    with store.database.transaction() as writer:
        writer.execute(text("SELECT 1"))
        assert tables.row() is None
    store.dispose()


def test_many_processes_that_are_the_first_at_a_file_all_find_their_way(tmp_path):
    url = f"sqlite:///{tmp_path}/new.db"
    children = [fork.Process(target=_first_at, args=[url, f"task-{number}"]) for number in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)

    assert [child.exitcode for child in children] == [0] * 8
    store = Store(url, namespace="proj")
    assert len(Tables(store).all()) == 8
    store.dispose()


def _first_at(url, task_id):
    store = Store(url, namespace="proj")
    store.upgrade()
    claimed(store, delivery(task_id))


@pytest.mark.report("lock-out")
def test_a_writer_waits_for_its_turn_and_a_heartbeat_says_soon_that_it_cannot_have_one(sqlite_url):
    store = Store(sqlite_url, namespace="proj", heartbeat_timeout=0.1)
    key = claimed(store).key
    with sqlite3.connect(store.database.file, isolation_level=None) as body:
        body.execute("BEGIN IMMEDIATE")
        done = threading.Event()
        writer = threading.Thread(target=lambda: (store.runs.record(key, []), done.set()))
        writer.start()
        with pytest.raises(StoreUnavailable, match="database is locked"):
            store.heartbeats.renew([key], 60.0)
        assert not done.is_set()
        body.execute("COMMIT")
        assert done.wait(10)
        writer.join()
    assert store.heartbeats.renew([key], 60.0) == {key}
    store.dispose()


@pytest.mark.report("lock-out")
def test_a_heartbeat_waits_for_its_turn_as_long_as_a_renewal_may_take(sqlite_url):
    store = Store(sqlite_url, namespace="proj", heartbeat_timeout=5.0)
    key = claimed(store).key
    renewed = []
    with sqlite3.connect(store.database.file, isolation_level=None) as body:
        body.execute("BEGIN IMMEDIATE")
        heartbeat = threading.Thread(target=lambda: renewed.append(store.heartbeats.renew([key], 60.0)))
        heartbeat.start()
        heartbeat.join(0.3)
        body.execute("COMMIT")
    heartbeat.join(10)
    assert renewed == [{key}]
    store.dispose()


# -- a database that does not answer -----------------------------------------------------------------


@pytest.fixture
def proxy(postgres_url):
    with FaultProxy(postgres_url) as proxy:
        yield proxy


def test_a_server_that_is_down_is_store_unavailable_and_works_again_when_it_is_up(proxy):
    store = Store(proxy.url, namespace="proj")
    claimed(store, delivery("before"))
    proxy.refuse()
    with pytest.raises(StoreUnavailable):
        claimed(store, delivery("meanwhile"))
    with pytest.raises(StoreUnavailable):
        store.now()

    proxy.heal()
    claimed(store, delivery("after"))
    store.dispose()


def _connect_all(store):
    held = [store.database.engine.connect() for _ in range(4)]
    for connection in held:
        connection.close()


def test_connections_that_broke_while_nobody_used_them_are_found_before_they_are_used(proxy, monkeypatch):
    store = Store(proxy.url, namespace="proj")
    _connect_all(store)
    proxy.reset()  # as a restart of the server, or a firewall, does
    monkeypatch.setattr("celery_durable.store.engine.IDLE_TIME", 0.0)

    for number in range(8):
        claimed(store, delivery(f"task-{number}"))
    store.dispose()


def test_a_connection_in_steady_use_is_not_tried_each_time(postgres_url, monkeypatch):
    store = Store(postgres_url, namespace="proj")
    store.now()
    pings = []
    monkeypatch.setattr(store.database.engine.dialect, "do_ping", pings.append)
    for _ in range(5):
        store.now()
    assert pings == []

    monkeypatch.setattr("celery_durable.store.engine.IDLE_TIME", 0.0)
    store.now()
    assert len(pings) == 1
    store.dispose()


def test_connections_that_broke_together_are_one_error(proxy):
    store = Store(proxy.url, namespace="proj")
    _connect_all(store)
    proxy.reset()

    with pytest.raises(StoreUnavailable):
        claimed(store)
    for number in range(8):
        claimed(store, delivery(f"task-{number}"))
    store.dispose()


def test_a_server_that_is_told_to_stop_is_store_unavailable(private_servers):
    server = private_servers.postgres
    store = Store(server.url(), namespace="proj")
    store.upgrade()
    server.stop()
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            store.now()

    server.start()
    claimed(store)
    store.dispose()


@pytest.mark.report("lock-out")
def test_a_renewal_that_would_wait_for_long_is_cut_off(private_servers):
    server = private_servers.postgres
    store = Store(server.url(), namespace="proj", heartbeat_timeout=0.2)
    store.upgrade()
    key = claimed(store).key
    # A table that somebody holds, which is how a statement gets to wait.
    with psycopg.connect(server.url(driver="postgresql")) as holder:
        holder.execute("LOCK TABLE durable_executions")
        with pytest.raises(StoreUnavailable, match="statement timeout"):
            store.heartbeats.renew([key], 60.0)
    assert store.heartbeats.renew([key], 60.0) == {key}
    store.dispose()


@pytest.mark.parametrize("ask", [claimed, Store.now, lambda store: store.heartbeats.renew([], 1.0)])
def test_a_server_that_cannot_be_connected_to_is_store_unavailable_for_every_kind_of_statement(ask):
    store = Store(f"postgresql+psycopg://postgres@127.0.0.1:{free_port()}/test", namespace="proj")

    with pytest.raises(StoreUnavailable, match="onnection refused"):
        ask(store)
    store.dispose()


def test_a_database_that_does_not_exist_and_a_user_that_does_not_are_told_from_an_outage(private_servers):
    good = make_url(private_servers.postgres.url())
    for url in (good.set(database="nosuch"), good.set(username="nosuch")):
        store = Store(url.render_as_string(hide_password=False), namespace="proj")
        with pytest.raises(LoginRefused, match="does not exist"):
            store.now()
        with pytest.raises(LoginRefused, match="does not exist"):
            claimed(store)
        store.dispose()


def test_tables_that_are_not_there_are_store_unavailable(empty_url):
    store = Store(empty_url, namespace="proj")

    with pytest.raises(StoreUnavailable, match=r"durable_executions"):
        claimed(store)
    store.dispose()


def test_a_mistake_in_a_statement_is_no_outage(postgres_url):
    database = Database(postgres_url)
    with pytest.raises(exc.ProgrammingError), database.statements() as connection:
        connection.execute(text("SELEC 1"))
    database.dispose()


def test_an_error_in_a_transaction_takes_it_back(store, tables):
    key = claimed(store).key
    with suppress(ZeroDivisionError), store.database.transaction() as connection:
        connection.execute(store.context.schema.executions.delete())
        raise ZeroDivisionError

    assert tables.row()["token"] == key.token


# -- what must not be told ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://user:s3cret@127.0.0.1:1/db",
        "postgresql+psycopg://user:s3cr%40et@127.0.0.1:1/db",
        "postgresql+psycopg://user@127.0.0.1:1/db?password=s3cret",
        "postgresql+psycopg://user@127.0.0.1:1/db?sslpassword=s3cret&connect_timeout=1",
    ],
)
def test_no_password_is_in_an_error_or_its_traceback(url):
    store = Store(url, namespace="proj")

    with pytest.raises(StoreUnavailable) as error:
        store.now()

    told = "".join(traceback.format_exception(error.value))
    assert "s3cret" not in told
    assert "s3cr%40et" not in told
    assert "s3cr@et" not in told
    assert "127.0.0.1" in str(error.value)


def test_no_argument_of_a_task_is_in_an_error_or_its_traceback(empty_url):
    store = Store(empty_url, namespace="proj")

    with pytest.raises(StoreUnavailable) as error:
        claimed(store)

    told = "".join(traceback.format_exception(error.value))
    assert "correlation_id" not in told
    assert "[[1], {}, {}]" not in told
    store.dispose()


def test_a_password_that_the_server_refuses_is_not_told(private_servers):
    server = private_servers.postgres
    server.execute("CREATE ROLE guest LOGIN PASSWORD 'right'")
    hba = server.folder / "data" / "pg_hba.conf"
    hba.write_text("host all guest 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n")
    server.signal(signal.SIGHUP)
    url = server.url().replace("postgres@", "guest:wr0ng@")

    def refused():
        try:
            Store(url, namespace="proj").now()
        except StoreUnavailable as error:
            return error
        return None

    error = wait_for(refused)
    assert isinstance(error, LoginRefused)
    assert "password authentication failed" in str(error)
    assert "wr0ng" not in "".join(traceback.format_exception(error))


# -- tables that do not fit ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        "ALTER TABLE durable_executions RENAME COLUMN status TO state",
        "ALTER TABLE durable_executions RENAME TO elsewhere",
    ],
)
def test_a_missing_table_or_column_is_no_outage_and_the_error_says_what_to_run(empty_url, damage):
    store = Store(empty_url, namespace="proj")
    store.upgrade()
    with store.database.statements() as connection:
        connection.execute(text(damage))
    for statement in (
        lambda: store.claims.claim(delivery(), "owner", 60.0, 3),
        lambda: store.due.take(10, lambda _name: (3, 60.0)),
        lambda: store.queries.get("id"),
    ):
        with pytest.raises(WrongTables, match="durable upgrade"):
            statement()
    store.dispose()


def test_a_function_that_the_database_does_not_have_is_no_outage(store):
    with pytest.raises(WrongTables), store.database.statements() as connection:
        connection.execute(text("SELECT no_such_function_here(1)"))


def test_a_mistake_in_a_statement_is_neither(store):
    with pytest.raises(exc.SQLAlchemyError), store.database.statements() as connection:
        connection.execute(text("INSERT INTO durable_journal (namespace) VALUES (NULL)"))
