"""Rows that somebody has written into by hand: nothing but that row is affected, and it can be looked at."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import update

from celery_durable import Durable
from celery_durable.claiming import Claiming
from celery_durable.cli import durable as durable_command
from celery_durable.dispatch import Dispatcher
from celery_durable.records import Claim, Due, JournalEntry, Kind, Outcome, OutcomeKind, Refusal, Scheduled
from celery_durable.store import Store
from tests.store.messages import delivery, due_in, edit, schedule
from tests.store.states import fall_asleep, run, sleep_entry

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

#: Text as PostgreSQL can hold it, hostile otherwise.
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=30),
    st.sampled_from(["'; DROP TABLE durable_executions; --", "../../etc/passwd", "\u202eevil", "x" * 10_000]),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
#: What kombu's decoder takes for an object of some type.
OBJECT = st.fixed_dictionaries(
    {"__type__": st.sampled_from(["datetime", "uuid", "decimal", "bytes", "base64", "nobody"])},
    optional={"__value__": JSON},
)
PROPERTY = st.sampled_from(
    ["priority", "delivery_mode", "correlation_id", "reply_to", "declare", "retry", "serializer", "exchange"]
)
DEEP = "[" * 3_000
STORED = st.one_of(
    TEXT,
    JSON.map(json.dumps),
    OBJECT.map(json.dumps),
    st.dictionaries(PROPERTY | TEXT, JSON | OBJECT, max_size=4).map(json.dumps),
    st.just(DEEP),
)
OUTCOME = st.one_of(
    STORED,
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["value", "exception", "cancelled", "who knows"]) | JSON},
        optional={"payload": JSON, "base64": JSON, "reason": JSON, "content_type": JSON},
    ).map(json.dumps),
)
#: As many as fit into some seconds; a failure is shown as it was found.
FEW = settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SMALL = st.integers(-(2**31), 2**31 - 1)
ROW = st.fixed_dictionaries(
    {},
    optional={
        "headers": STORED | st.none(),
        "properties": STORED | st.none(),
        "outcome": OUTCOME,
        "body": st.binary(max_size=20) | st.none(),
        "content_type": TEXT | st.none(),
        "content_encoding": TEXT | st.none(),
        "compression": TEXT | st.none(),
        "exchange": TEXT | st.none(),
        "routing_key": TEXT | st.none(),
        "task_name": TEXT,
        "status": st.sampled_from(["sleeping", "ending", "running", "outbox", "succeeded", "asleep?", ""]),
        "owner": TEXT | st.none(),
        "send_id": TEXT | st.none(),
        "past_sends": TEXT | st.none(),
        "token": st.sampled_from([-1, -(2**63), 0, 2**62]),
        "sends": SMALL,
        "crashes": SMALL,
        "failures": SMALL,
        "nesting": SMALL,
        "message_version": SMALL,
    },
)


@pytest.fixture
def app(store_url: str) -> Iterator[Celery]:
    app = Celery("proj", broker="memory://", backend="cache+memory://", set_as_current=False)
    Durable(app, database_url=store_url, namespace="proj", notify=False)
    app.control.purge()
    yield app
    app.control.purge()
    app.durable.store.dispose()
    app.close()


@pytest.fixture
def dispatcher(app: Celery) -> Iterator[Dispatcher]:
    dispatcher = Dispatcher(app, app.durable.runtime, app.durable.crash_limits)
    yield dispatcher
    dispatcher.close()


def sent(app: Celery) -> dict[str, Any]:
    """The messages that wait in the queue, by their ids, taken out of it."""
    found = {}
    with app.connection_for_read() as connection, connection.SimpleQueue("celery") as queue:
        while queue.qsize():
            message = queue.get_nowait()
            found[(message.headers or {}).get("id")] = message
            message.ack()
    return found


def command(app: Celery, *arguments: str) -> tuple[int, str]:
    """Run `celery durable` with some arguments: exit code and output. A traceback is a failed test."""
    context = CLIContext(app=app, no_color=True, workdir=None)
    done = CliRunner().invoke(durable_command, arguments, obj=context)
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    done.output.encode()
    return done.exit_code, done.output


class TestFuzzed:
    @pytest.mark.report("unreadable-row")
    @FEW
    @given(values=ROW, is_leased=st.booleans())
    def test_whatever_stands_in_a_row_the_others_go_on(
        self, app: Celery, store: Store, dispatcher: Dispatcher, values: dict[str, Any], is_leased: bool
    ) -> None:
        empty(store)
        sent(app)
        schedule(store, "first", due_in=-3)
        if is_leased:
            run(store, "hostile")
        else:
            schedule(store, "hostile")
        schedule(store, "last", due_in=-1)
        edit(store, "hostile", wake_at=store.context.now(-2.0), **values)

        dispatcher.run_once()
        assert {"first", "last"} <= set(sent(app))
        assert not dispatcher._publisher.broker.is_away
        assert store.due.poll().due_in > 0, "it is not due again at once"

        for is_wake in (True, False):
            answer = store.claims.claim(delivery("hostile", is_wake=is_wake), "worker", 60.0, 3)
            assert isinstance(answer, Claim | Refusal | Scheduled)
        if store.queries.get("hostile") is not None:
            assert command(app, "show", "hostile", "--reveal")[0] == 0
            assert command(app, "show", "hostile", "--reveal", "--json")[0] == 0
        assert command(app, "list")[1].count("proj.tasks.onboard") >= 2
        assert command(app, "stats")[0] == 0
        for verb in (["wake"], ["postpone", "--by", "1h"], ["release"], ["cancel"]):
            assert command(app, verb[0], "hostile", *verb[1:])[0] in (0, 1)


def empty(store: Store) -> None:
    schema = store.context.schema
    with store.database.transaction() as connection:
        for table in (schema.executions, schema.journal):
            connection.execute(table.delete())


class TestOutcome:
    @pytest.mark.parametrize(
        "text",
        [
            "{",
            "[]",
            "5",
            "{}",
            '{"kind": "who knows"}',
            '{"kind": {"value": 1}}',
            '{"kind": "value", "payload": 5}',
            '{"kind": "value", "reason": []}',
        ],
    )
    @pytest.mark.parametrize("is_leased", [True, False])
    def test_one_that_cannot_be_read_sets_the_row_aside(
        self, app: Celery, store: Store, dispatcher: Dispatcher, text: str, is_leased: bool
    ) -> None:
        run(store, "bad")
        edit(store, "bad", outcome=text, wake_at=store.context.now(-2.0))
        if not is_leased:
            edit(store, "bad", owner=None)
        schedule(store, "good")
        assert dispatcher.run_once() == 2
        assert list(sent(app)) == ["good"]
        assert due_in(store, "bad") > 3500
        assert "unreadable: not an outcome" in command(app, "show", "bad")[1]

    def test_a_worker_that_gets_its_message_drops_it_and_is_free(self, store: Store) -> None:
        fall_asleep(store, "bad")
        edit(store, "bad", outcome="{", sends=1)
        answer = store.claims.claim(delivery("bad", is_wake=True), "worker", 60.0, 3)
        assert isinstance(answer, Refusal)
        assert "cannot be read" in answer.reason

    def test_whoever_counts_on_its_id_is_refused_and_goes_on(self, store: Store) -> None:
        fall_asleep(store, "bad")
        edit(store, "bad", outcome="{")
        refusal = store.claims.schedule(delivery("bad", send_id="another"), Due(seconds=5))
        assert refusal is not None
        assert "cannot be read" in refusal.reason


class TestCounts:
    @pytest.mark.parametrize("name", ["sends", "failures", "crashes", "message_version"])
    @pytest.mark.parametrize("is_leased", [True, False])
    def test_one_that_cannot_grow_sets_the_row_aside(
        self, app: Celery, store: Store, dispatcher: Dispatcher, name: str, is_leased: bool
    ) -> None:
        if is_leased:
            run(store, "bad")
        else:
            fall_asleep(store, "bad")
        edit(store, "bad", wake_at=store.context.now(-2.0), **{name: 2**31 - 1})
        schedule(store, "good")
        assert dispatcher.run_once() == 2
        assert list(sent(app)) == ["good"]
        assert due_in(store, "bad") > 3500
        assert command(app, "show", "bad")[0] == 0
        assert command(app, "cancel", "bad")[0] in (0, 1)


class TestTimes:
    @pytest.mark.report("absurd-times")
    def test_a_live_row_without_a_time_is_shown_and_can_be_woken(
        self, app: Celery, store: Store, dispatcher: Dispatcher
    ) -> None:
        fall_asleep(store, "lost")
        edit(store, "lost", wake_at=None)
        schedule(store, "good")
        assert dispatcher.run_once() == 1
        assert "lost" in command(app, "list")[1]
        assert command(app, "show", "lost")[0] == 0
        assert command(app, "wake", "lost")[0] == 0
        sent(app)
        dispatcher.run_once()
        assert "lost" in sent(app)

    @pytest.mark.parametrize("state", [fall_asleep, run])
    @pytest.mark.parametrize("nonsense", ["", "2020-13-45"])
    def test_nonsense_that_is_due_before_all_others_holds_up_none_of_them(
        self, app: Celery, store: Store, dispatcher: Dispatcher, nonsense: str, state: Any
    ) -> None:
        if not store.database.is_sqlite:
            # PostgreSQL takes none, as the test below shows.
            return
        state(store, "bad")
        schedule(store, "good")
        write_times(store, "bad", nonsense)
        outlook = store.due.poll()
        assert outlook.due_in is not None
        assert outlook.due_in <= 0
        assert dispatcher.run_once() >= 1
        assert "good" in sent(app)
        assert dispatcher.run_once() == 0, "it is set aside"

    def test_nonsense_in_a_file_is_no_time(self, app: Celery, store: Store, dispatcher: Dispatcher) -> None:
        if not store.database.is_sqlite:
            with pytest.raises(Exception, match="invalid input syntax"):
                write_times(store, "x")
            return
        fall_asleep(store, "bad")
        schedule(store, "good")
        write_times(store, "bad")
        assert dispatcher.run_once() >= 1
        assert "good" in sent(app)
        for verb in ("show", "wake", "cancel"):
            assert command(app, verb, "bad")[0] in (0, 1)
        assert "bad" in command(app, "list")[1]


def write_times(store: Store, task_id: str, wake_at: str = "soon") -> None:
    with store.database.statements() as connection:
        connection.exec_driver_sql(
            f"UPDATE durable_executions SET wake_at = '{wake_at}', created_at = '', updated_at = 'noon'"
            f" WHERE task_id = '{task_id}'"
        )


class TestJournal:
    @pytest.mark.parametrize(
        "values",
        [
            {"kind": "dance"},
            {"position": 7},
            {"position": -1},
            {"payload": b"\xff{", "content_type": "application/json"},
            {"content_type": "application/x-python-serialize"},
            {"content_type": "\u202e", "content_encoding": "no such"},
            {"due_at": None, "kind": "sleep"},
        ],
        ids=str,
    )
    def test_one_that_cannot_be_read_is_shown_and_handed_to_its_run_alone(
        self, app: Celery, store: Store, values: dict[str, Any]
    ) -> None:
        key = run(store, "bad")
        entry = JournalEntry(1, Kind.STEP, "pay", payload=b"1", content_type="application/json")
        assert store.runs.park(key, Due(), entries=[entry, sleep_entry(2)])
        journal = store.context.schema.journal
        with store.database.statements() as connection:
            connection.execute(
                update(journal)
                .where(store.context.mine(journal, "bad"), journal.c.position == 1)
                .values(values)
            )
        assert "sleep 2" in command(app, "show", "bad", "--reveal")[1]
        assert command(app, "show", "bad", "--reveal", "--json")[0] == 0
        edit(store, "bad", sends=1)
        assert isinstance(store.claims.claim(delivery("bad", is_wake=True), "worker", 60.0, 3), Claim)


class Bomb:
    """Whoever unpickles it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class TestBody:
    def test_the_scheduler_never_decodes_it(
        self, app: Celery, store: Store, dispatcher: Dispatcher, tmp_path: Path
    ) -> None:
        body, trace = pickle.dumps(Bomb(tmp_path / "exploded")), tmp_path / "exploded"
        app.conf.accept_content = ["pickle", "json"]
        schedule(store, "bomb")
        edit(
            store, "bomb", body=body, content_type="application/x-python-serialize", content_encoding="binary"
        )
        assert dispatcher.run_once() == 1
        message = sent(app)["bomb"]
        assert command(app, "show", "bomb", "--reveal")[0] == 0
        assert command(app, "cancel", "bomb")[0] == 0
        assert (message.body, message.content_type) == (body, "application/x-python-serialize")
        assert not trace.exists()
        pickle.loads(message.body)
        assert trace.exists(), "it would have been seen"


class Stopping:
    """A worker's main process that asks its children to stop after so many questions."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def report(self, *_: Any) -> None:
        """Nobody listens."""

    @property
    def is_stopping(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_wake_that_no_claim_goes_through_for_is_dropped_and_its_process_is_free(
    app: Celery, store: Store
) -> None:
    """Here a token that cannot grow; its row sends another wake, later and later."""
    fall_asleep(store, "bad")
    edit(store, "bad", token=2**63 - 1, sends=1)
    if store.database.is_sqlite:
        return
    clock = QuickClock()
    claiming = Claiming(lambda: app.durable.runtime, Stopping(100), clock)
    limits: Any = app.durable.settings
    answer = claiming.claim(delivery("bad", is_wake=True), limits)
    assert isinstance(answer, Refusal)
    assert clock.now < 20


class QuickClock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds


def test_an_outcome_is_read_as_it_was_written(store: Store) -> None:
    for number, kind in enumerate(sorted(OutcomeKind.ALL)):
        key = run(store, f"{number}")
        outcome = Outcome(kind, "because", b"\xff", "application/json", "utf-8")
        assert store.runs.end(key, outcome, 60.0) is not None
        found = store.queries.get(f"{number}")
        assert found is not None
        assert found.outcome == outcome
