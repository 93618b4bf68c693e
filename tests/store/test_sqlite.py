"""Writers of one SQLite file take turns."""

from __future__ import annotations

import sqlite3

import pytest

from celery_durable.store import sqlite
from celery_durable.store.sqlite import FIRST_PAUSE, LONGEST_PAUSE, HeartbeatTurns, TurnTaker, prepare


@pytest.fixture
def connect(tmp_path):
    """Makes connections to one file."""
    made = []

    def connect(database=tmp_path / "turns.db", timeout=10.0, factory=TurnTaker):
        connection = sqlite3.connect(database, timeout=timeout, factory=factory)
        made.append(connection)
        prepare(connection)
        return connection

    yield connect
    for connection in made:
        connection.close()


@pytest.fixture
def pauses(monkeypatch):
    """The pauses (seconds) that were made, none of which takes any time. `.then` is called after each."""

    class Pauses(list):
        then = staticmethod(lambda count: None)

        def __call__(self, seconds):
            self.append(seconds)
            self.then(len(self))

    pauses = Pauses()
    monkeypatch.setattr(sqlite.time, "sleep", pauses)
    return pauses


@pytest.fixture
def writer(connect):
    """A connection in the midst of a write."""
    writer = connect()
    writer.execute("CREATE TABLE words (word)")
    writer.execute("BEGIN IMMEDIATE")
    return writer


def test_a_writer_has_its_turn_right_after_the_one_before_it(connect, writer, pauses):
    pauses.then = lambda count: writer.execute("COMMIT") if count == 3 else None

    connect().execute("INSERT INTO words VALUES ('second')")

    assert len(pauses) == 3
    assert max(pauses) < 0.001, "SQLite's own first pause is a millisecond"


def test_it_asks_less_and_less_often(connect, writer, pauses):
    pauses.then = lambda count: writer.execute("COMMIT") if count == 30 else None

    connect().cursor().execute("INSERT INTO words VALUES ('second')")

    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE, LONGEST_PAUSE)
    assert connect().execute("SELECT count(*) FROM words").fetchone() == (1,)


def test_who_has_little_patience_such_as_a_heartbeat_asks_more_often(connect, writer, pauses):
    pauses.then = lambda count: writer.execute("COMMIT") if count == 30 else None

    connect(timeout=0.1).execute("INSERT INTO words VALUES ('second')")

    assert pauses[-1] == 0.001


def test_a_heartbeat_asks_as_often_though_it_has_more_patience(connect, writer, pauses):
    """As often as the others it would be the one that is always too late."""
    pauses.then = lambda count: writer.execute("COMMIT") if count == 30 else None

    connect(factory=HeartbeatTurns).execute("INSERT INTO words VALUES ('second')")

    assert pauses[-1] == 0.001


def test_a_transaction_waits_where_it_begins(connect, writer, pauses):
    pauses.then = lambda count: writer.execute("COMMIT")
    second = connect()

    second.execute("BEGIN IMMEDIATE")
    second.execute("INSERT INTO words VALUES ('second')")
    second.execute("COMMIT")

    assert len(pauses) == 1


def test_whoever_waits_too_long_is_told(connect, writer, pauses):
    with pytest.raises(sqlite3.OperationalError, match="^database is locked$"):
        connect(timeout=0.0).execute("INSERT INTO words VALUES ('second')")
    assert pauses == []


def test_a_reader_does_not_wait(connect, writer, pauses):
    assert connect().execute("SELECT count(*) FROM words").fetchone() == (0,)
    assert pauses == []


def test_what_fails_for_another_reason_is_not_tried_again(connect, pauses):
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        connect().execute("INSERT INTO words VALUES ('first')")
    assert pauses == []


def test_sqlite_itself_waits_where_a_commit_may_have_to(connect):
    on_disk, in_memory = connect(), connect(":memory:")

    assert on_disk.execute("PRAGMA busy_timeout").fetchone() == (0,)
    assert in_memory.execute("PRAGMA busy_timeout").fetchone() == (10_000,)
