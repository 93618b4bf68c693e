"""A store with its tables made, on each database in turn; a way to see and to bend its rows.

store_url    see tests/conftest.py; here the tables are in it already
empty_url    a database without tables
store        Store of the namespace "proj"
open_store   makes more of them on the same database: another process, or another namespace
tables       Tables: reads and writes rows past all rules, as a test's hand in the database
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_durable.store import Store
from tests.nodes import Servers
from tests.store.tables import Tables

NAMESPACE = "proj"
TABLES = ("durable_executions", "durable_journal", "durable_schedule")
OTHERS_LEAVE = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the tables in it."""
    path = tmp_path_factory.mktemp("template") / "store.db"
    store = Store(f"sqlite:///{path}", namespace=NAMESPACE)
    store.upgrade()
    store.dispose()
    return path


@pytest.fixture
def sqlite_url(tmp_path: Path, sqlite_template: Path) -> str:
    path = tmp_path / "store.db"
    shutil.copy(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture(scope="session")
def postgres_database(servers: Servers) -> str:
    """The name of a database with the tables in it, for all tests of this process in turn."""
    name = servers.postgres.create_database()
    store = Store(servers.postgres.url(name), namespace=NAMESPACE)
    store.upgrade()
    store.dispose()
    return name


@pytest.fixture
def postgres_url(servers: Servers, postgres_database: str) -> Iterator[str]:
    server = servers.postgres
    yield server.url(postgres_database)
    # A test that failed may have left a transaction open.
    server.execute(f"{OTHERS_LEAVE}; TRUNCATE {', '.join(TABLES)}", database=postgres_database)


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path, servers: Servers) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/empty.db"
        return
    name = servers.postgres.create_database()
    yield servers.postgres.url(name)
    servers.postgres.drop_database(name)


@pytest.fixture
def open_store(store_url: str) -> Iterator[Callable[..., Store]]:
    opened: list[Store] = []

    def open_one(**options: Any) -> Store:
        store = Store(store_url, **{"namespace": NAMESPACE, **options})
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.dispose()


@pytest.fixture
def store(open_store: Callable[..., Store]) -> Store:
    return open_store()


@pytest.fixture
def tables(store: Store) -> Tables:
    return Tables(store)
