"""The tables: made and migrated by whoever comes first, and what the models say they are."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import traceback

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text

from celery_durable.errors import ConfigurationError
from celery_durable.store import Store, upgrade
from tests.store.tables import claimed, delivery

fork = multiprocessing.get_context("fork")

TABLES = {"durable_executions", "durable_journal", "durable_schedule", "durable_version"}


@pytest.fixture
def open_empty(empty_url):
    """Makes stores on a database without tables."""
    opened = []

    def open_one(**options):
        store = Store(empty_url, **{"namespace": "proj", **options})
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.dispose()


@pytest.fixture
def empty(open_empty):
    return open_empty()


def tables_of(store, schema=None):
    return set(inspect(store.database.engine).get_table_names(schema))


def indexes_of(store, table="durable_executions"):
    return {
        index["name"]: index["column_names"] for index in inspect(store.database.engine).get_indexes(table)
    }


# -- making ----------------------------------------------------------------------------------------


def test_an_empty_database_gets_its_tables(empty):
    assert upgrade.current_version(empty.context) is None
    empty.upgrade()

    assert tables_of(empty) == TABLES
    assert upgrade.current_version(empty.context) == upgrade.newest_version()
    claimed(empty)


def test_doing_it_again_changes_nothing(empty):
    empty.upgrade()
    claimed(empty)
    empty.upgrade()

    assert len(empty.due.take(10, lambda name: (3, 60.0)).outgoing) == 0
    assert tables_of(empty) == TABLES


def test_the_models_are_what_the_migrations_make(empty):
    empty.upgrade()
    with empty.database.engine.connect() as connection:
        context = MigrationContext.configure(
            connection,
            opts={
                "version_table": "durable_version",
                "compare_type": True,
                "compare_server_default": True,
            },
        )
        assert compare_metadata(context, empty.context.schema.metadata) == []


def test_the_index_of_what_is_due_holds_nothing_that_waits_for_nothing(empty):
    empty.upgrade()
    assert indexes_of(empty)["durable_executions_due"] == ["namespace", "wake_at"]
    with empty.database.statements() as connection:
        if empty.database.is_sqlite:
            found = text("SELECT sql FROM sqlite_master WHERE name = 'durable_executions_due'")
        else:
            found = text("SELECT indexdef FROM pg_indexes WHERE indexname = 'durable_executions_due'")
        assert "wake_at IS NOT NULL" in connection.execute(found).scalar_one()


def test_other_tables_in_the_database_are_left_alone(empty):
    with empty.database.transaction() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('the users own')"))
        connection.execute(text("CREATE TABLE customers (id INTEGER)"))
    empty.upgrade()

    assert tables_of(empty) == TABLES | {"alembic_version", "customers"}
    with empty.database.statements() as connection:
        assert (
            connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
            == "the users own"
        )


# -- where -----------------------------------------------------------------------------------------


def test_a_prefix_gives_the_tables_and_indexes_another_name(open_empty):
    store = open_empty(prefix="shop_")
    store.upgrade()

    assert tables_of(store) == {"shop_executions", "shop_journal", "shop_schedule", "shop_version"}
    assert set(indexes_of(store, "shop_executions")) >= {"shop_executions_due", "shop_executions_finished"}
    claimed(store)


def test_two_prefixes_are_two_worlds_in_one_database(open_empty):
    shop, house = open_empty(prefix="shop_"), open_empty()
    shop.upgrade()
    house.upgrade()

    assert claimed(shop).key.token == claimed(house).key.token == 1


def test_the_longest_prefix_makes_names_that_the_database_takes(open_empty):
    store = open_empty(prefix="p" * 32)
    store.upgrade()
    store.upgrade()

    assert len(tables_of(store)) == 4


@pytest.mark.parametrize("exists", [True, False])
def test_a_schema_is_used_and_made_where_it_is_missing(servers, exists):
    name = servers.postgres.create_database()
    store = Store(servers.postgres.url(name), namespace="proj", schema="Durable Tasks")
    if exists:
        servers.postgres.execute('CREATE SCHEMA "Durable Tasks"', database=name)
    try:
        store.upgrade()
        claimed(store)

        assert tables_of(store, "Durable Tasks") == TABLES
        assert tables_of(store) == set()
    finally:
        store.dispose()
        servers.postgres.drop_database(name)


def test_a_role_that_may_not_make_schemas_can_use_one_that_is_there(servers):
    server = servers.postgres
    name = server.create_database()
    server.execute("CREATE ROLE tenant LOGIN")
    server.execute('CREATE SCHEMA "tenant" AUTHORIZATION tenant', database=name)
    store = Store(server.url(name).replace("postgres@", "tenant@"), namespace="proj", schema="tenant")
    try:
        store.upgrade()
        claimed(store)
    finally:
        store.dispose()
        server.drop_database(name)
        server.execute("DROP ROLE tenant")


def test_a_percent_sign_in_the_path_of_the_package_is_just_that(empty, tmp_path, monkeypatch):
    elsewhere = tmp_path / "50%off"
    elsewhere.mkdir()
    (elsewhere / "migrations").symlink_to(upgrade.MIGRATIONS)
    monkeypatch.setattr(upgrade, "MIGRATIONS", elsewhere / "migrations")

    empty.upgrade()
    assert tables_of(empty) == TABLES


# -- many at once ----------------------------------------------------------------------------------


def start_at_once(empty_url, count):
    """Processes that upgrade at the same moment, as workers do that a deploy starts."""
    barrier = fork.Barrier(count)
    results = fork.SimpleQueue()

    def work(number):
        try:
            store = Store(empty_url, namespace="proj")
            barrier.wait(20)
            store.upgrade()
            claimed(store, delivery(f"task-{number}"))
            results.put("ready")
        except BaseException:  # noqa: BLE001 - the test shows it
            results.put(traceback.format_exc())
        finally:
            os._exit(0)

    processes = [fork.Process(target=work, args=[number]) for number in range(count)]
    for process in processes:
        process.start()
    answers = [results.get() for _ in processes]
    for process in processes:
        process.join(20)
    return answers


def test_eight_processes_that_start_at_once_make_the_tables_once(empty_url, empty):
    assert start_at_once(empty_url, 8) == ["ready"] * 8

    with empty.database.statements() as connection:
        versions = connection.execute(text("SELECT version_num FROM durable_version")).scalars().all()
    assert versions == [upgrade.newest_version()]
    assert tables_of(empty) == TABLES


def test_threads_that_upgrade_different_databases_at_once_do_not_mix_them_up(tmp_path, servers):
    name = servers.postgres.create_database()
    urls = [f"sqlite:///{tmp_path}/{number}.db" for number in range(3)] + [servers.postgres.url(name)]
    stores = [Store(url, namespace="proj") for url in urls]
    errors = []

    def work(store):
        try:
            store.upgrade()
            claimed(store)
        except Exception as error:  # noqa: BLE001 - the test shows it
            errors.append(error)

    threads = [threading.Thread(target=work, args=[store]) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert errors == []
        assert [tables_of(store) for store in stores] == [TABLES] * 4
    finally:
        for store in stores:
            store.dispose()
        servers.postgres.drop_database(name)


def test_an_upgrade_that_fails_leaves_nothing_half_done(empty):
    with empty.database.transaction() as connection:
        connection.execute(text("CREATE TABLE durable_schedule (mine INTEGER)"))

    with pytest.raises(Exception, match="durable_schedule"):
        empty.upgrade()

    assert tables_of(empty) == {"durable_schedule"}
    with empty.database.transaction() as connection:
        connection.execute(text("DROP TABLE durable_schedule"))
    empty.upgrade()
    assert tables_of(empty) == TABLES


# -- checking --------------------------------------------------------------------------------------


def test_a_check_accepts_the_tables_of_this_release(empty):
    empty.upgrade()
    empty.check()


def test_a_check_refuses_to_go_on_without_tables_and_makes_none(empty):
    with pytest.raises(ConfigurationError, match="there are no tables in .* yet.*durable upgrade"):
        empty.check()

    assert tables_of(empty) == set()


def test_tables_of_a_later_release_are_refused_by_both_in_words(empty):
    empty.upgrade()
    with empty.database.statements() as connection:
        connection.execute(text("UPDATE durable_version SET version_num = '9999'"))

    with pytest.raises(ConfigurationError, match="at version 9999, this release needs"):
        empty.check()
    with pytest.raises(ConfigurationError, match="9999, which this release does not know"):
        empty.upgrade()


def test_no_password_is_in_the_message(servers):
    server = servers.postgres
    url = server.url().replace("postgres@", "postgres:s3cret@")
    store = Store(url, namespace="proj", prefix="never_made_")

    with pytest.raises(ConfigurationError) as refused:
        store.check()

    assert "s3cret" not in str(refused.value)
    assert "***" in str(refused.value)
    store.dispose()


def test_an_engine_of_somebody_else_sees_ordinary_tables(empty, empty_url):
    empty.upgrade()
    claimed(empty)
    engine = create_engine(empty_url)
    with engine.connect() as connection:
        found = connection.execute(text("SELECT status, draining FROM durable_executions")).one()
    engine.dispose()

    assert found.status == "running"
    assert not found.draining


# -- what is logged --------------------------------------------------------------------------------


def test_the_log_tells_of_an_upgrade_in_one_line_of_ours(empty, caplog):
    caplog.set_level(logging.INFO)
    empty.upgrade()
    empty.upgrade()
    empty.check()

    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("celery_durable.store.upgrade", "INFO")
    ]
    assert upgrade.newest_version() in caplog.text


def test_an_application_hears_alembic_as_before(empty, caplog):
    caplog.set_level(logging.INFO)
    empty.upgrade()
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if "alembic" in name]
    assert [(one.filters, one.level, one.disabled) for one in loggers] == [([], logging.NOTSET, False)] * len(
        loggers
    )
    with empty.database.engine.begin() as connection:
        MigrationContext.configure(connection).get_current_revision()

    assert "alembic.runtime.migration" in [record.name for record in caplog.records]


def test_a_process_whose_log_is_set_up_first_hears_nothing_of_alembic(tmp_path):
    program = f"""
import logging
logging.basicConfig(level=logging.INFO)
from celery_durable.store import Store
Store("sqlite:///{tmp_path}/store.db", namespace="proj").upgrade()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert [line.split(":")[1] for line in done.stderr.splitlines()] == ["celery_durable.store.upgrade"]
