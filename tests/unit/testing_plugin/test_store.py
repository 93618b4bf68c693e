"""The store of a test: what the migrations would make, empty each time, with a time that stands still."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from celery_durable.store import Store
from celery_durable.store.memory import store_in_memory

NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)


def test_its_tables_are_those_of_the_newest_version():
    migrated = Store("sqlite://", namespace="proj")
    migrated.upgrade()
    with store_in_memory(namespace="proj", prefix="durable_") as store:
        store.check()
        store.upgrade()
        for each in (store, migrated):
            with each.database.engine.connect() as connection:
                options = {"version_table": "durable_version", "compare_type": True}
                context = MigrationContext.configure(connection, opts=options)
                assert compare_metadata(context, each.context.schema.metadata) == []


def test_two_at_a_time_are_two():
    with (
        store_in_memory(namespace="proj", prefix="durable_") as one,
        store_in_memory(namespace="proj", prefix="durable_") as other,
    ):
        one.verdicts.cancel(["1"], "revoked")
        assert one.queries.get("1") is not None
        assert other.queries.get("1") is None


def test_each_is_empty():
    for _ in range(2):
        with store_in_memory(namespace="proj", prefix="durable_") as store:
            assert store.queries.get("1") is None
            store.verdicts.cancel(["1"], "revoked")


def test_its_time_stands_still_and_is_asked_for_anew_by_each_statement():
    with store_in_memory(namespace="proj", prefix="durable_") as store:
        for now in (NOON, NOON + timedelta(days=400)):
            store.stopped_at[:] = [now]
            assert store.now() == now
            assert store.due.poll().now == now
        store.stopped_at.clear()
        assert abs(store.now() - datetime.now(timezone.utc)) < timedelta(minutes=1)
