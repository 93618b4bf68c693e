"""What the holder of a lease writes, and that nobody else's write counts; on each database."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from celery_durable.records import (
    Due,
    Ended,
    JournalEntry,
    Kind,
    Message,
    Outcome,
    OutcomeKind,
    Refusal,
    Status,
)
from celery_durable.replay import timer_id
from celery_durable.store import Store
from celery_durable.store.changes import FEW
from tests.store.tables import (
    MESSAGE,
    OTHER,
    OWNER,
    TTL,
    Statements,
    asleep,
    claimed,
    delivery,
    follower,
    refused,
    sleep,
    step,
    wake,
)

VALUE = Outcome(OutcomeKind.VALUE, None, b"42", "application/json", "utf-8")
FAILURE = Outcome(OutcomeKind.EXCEPTION, "ValueError: no", b"{}", "application/json", "utf-8")
UNTOLD = Outcome(OutcomeKind.VALUE)
CANCELLED = Outcome(OutcomeKind.CANCELLED)
NEW_MESSAGE = Message('{"retries": 1}', "{}", b"new", None, None, "zlib", "ex", "rk")


@pytest.fixture
def key(store):
    """The lease of a task that runs."""
    return claimed(store).key


# -- the fence -------------------------------------------------------------------------------------


WRITES = {
    "record": lambda store, key: store.runs.record(key, [step(1)]),
    "record nothing": lambda store, key: store.runs.record(key, []),
    "record many": lambda store, key: store.runs.record(key, [step(n) for n in range(1, FEW + 3)]),
    "record_sleep": lambda store, key: store.runs.record_sleep(key, [sleep(1)], Due(seconds=1)),
    "park": lambda store, key: store.runs.park(key, Due(seconds=60), entries=[sleep(1)]),
    "park again": lambda store, key: store.runs.park(key, Due(seconds=60)),
    "park for a retry": lambda store, key: store.runs.park(
        key, Due(seconds=60), status=Status.RETRYING, message=NEW_MESSAGE, restart=True
    ),
    "end": lambda store, key: store.runs.end(key, VALUE, TTL),
    "end with followers": lambda store, key: store.runs.end(
        key, VALUE, TTL, entries=[step(1)], followers=[follower("next"), follower("plain", durable=False)]
    ),
    "close": lambda store, key: store.runs.close(key, UNTOLD, entries=[step(1)]),
    "close with followers": lambda store, key: store.runs.close(
        key, UNTOLD, followers=[follower("next"), follower("plain", durable=False)]
    ),
    "set_aside": lambda store, key: store.runs.set_aside(key),
    "finish": lambda store, key: store.runs.finish(key, Status.SUCCEEDED),
}
EXCEPT_FINISH = [name for name in WRITES if name != "finish"]


def taken_over(store, tables, key):
    """Another worker has claimed the task after the lease ran out."""
    tables.expire()
    claimed(store, wake(), OTHER)
    return key


def taken_over_by_the_same_process(store, tables, key):
    tables.expire()
    claimed(store, wake(), OWNER)
    return key


def sent_again(store, tables, key):
    """The scheduler has found the lease expired and has sent a wake."""
    tables.send_wake()
    return key


def of_another_owner(store, tables, key):
    return replace(key, owner=OTHER)


def of_a_token_to_come(store, tables, key):
    return replace(key, token=2)


def of_another_task(store, tables, key):
    return replace(key, task_id="other")


STRANGERS = [
    taken_over,
    taken_over_by_the_same_process,
    sent_again,
    of_another_owner,
    of_a_token_to_come,
    of_another_task,
]


@pytest.mark.report("fencing")
@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: stranger.__name__)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_without_the_current_lease_is_refused_and_changes_nothing(
    store, tables, key, write, stranger
):
    stale = stranger(store, tables, key)
    before = tables.everything()

    assert not WRITES[write](store, stale)

    assert tables.everything() == before
    assert tables.journal("other") == []


@pytest.mark.parametrize("write", WRITES)
def test_the_same_write_of_the_new_owner_is_accepted(store, tables, key, write):
    tables.expire()
    key = claimed(store, wake(), OTHER).key

    assert WRITES[write](store, key)


@pytest.mark.parametrize("write", EXCEPT_FINISH)
def test_a_write_after_a_cancel_is_refused_and_changes_nothing(store, tables, key, write):
    store.verdicts.cancel(["id"])
    before = tables.everything()

    assert not WRITES[write](store, key)
    assert tables.everything() == before


@pytest.mark.parametrize("write", [name for name in EXCEPT_FINISH if not name.startswith("end")])
def test_nothing_is_written_any_more_by_a_run_that_has_come_to_its_end(store, tables, key, write):
    store.runs.end(key, VALUE, TTL)
    before = tables.everything()

    assert not WRITES[write](store, key)
    assert tables.everything() == before


@pytest.mark.parametrize("write", WRITES)
def test_another_namespace_is_another_world(store, open_store, tables, key, write):
    before = tables.everything()

    assert not WRITES[write](open_store(namespace="shop"), key)
    assert tables.everything() == before


@pytest.mark.parametrize("write", WRITES)
def test_a_lease_that_ran_out_but_that_nobody_has_taken_still_writes(store, tables, key, write):
    tables.expire(seconds=100)

    assert WRITES[write](store, key)


# -- steps -----------------------------------------------------------------------------------------


def test_a_step_is_journaled_as_it_is(store, tables, key):
    payload = bytes(range(256))
    entry = JournalEntry(
        3, Kind.STEP, "proj.pay — ünicode", payload=payload, content_type="x/y", content_encoding="binary"
    )
    before = store.now()

    assert store.runs.record(key, [entry])

    (row,) = tables.journal()
    assert (row["position"], row["kind"], row["name"]) == (3, "step", "proj.pay — ünicode")
    assert (row["payload"], row["content_type"], row["content_encoding"]) == (payload, "x/y", "binary")
    assert (row["timer_id"], row["due_at"]) == (timer_id("id", 3), None)
    assert before <= row["recorded_at"] <= store.now()


@pytest.mark.parametrize("count", [1, 2, FEW, FEW + 1, 100])
def test_a_failed_step_is_journaled_with_the_next_entry_in_one_write(store, tables, key, count):
    entries = [JournalEntry(n, Kind.ERROR, f"step-{n}", payload=b"{}") for n in range(1, count)]

    assert store.runs.record(key, [*entries, step(count)])

    assert [(row["position"], row["kind"]) for row in tables.journal()] == [
        *((n, "error") for n in range(1, count)),
        (count, "step"),
    ]


def test_a_step_without_a_result_is_journaled(store, tables, key):
    assert store.runs.record(key, [JournalEntry(1, Kind.STEP, "")])
    assert tables.journal()[0]["payload"] is None


def test_a_step_leaves_the_lease_as_it_is(store, tables, key):
    before = tables.row()
    store.runs.record(key, [step(1)])
    after = tables.row()

    for column in ("status", "owner", "token", "wake_at", "sends", "body"):
        assert after[column] == before[column]


def test_progress_forgives_crashes(store, tables, key):
    tables.put(crashes=2)
    store.runs.record(key, [step(1)])

    assert tables.row()["crashes"] == 0


def test_a_step_whose_answer_was_lost_is_recorded_again_without_harm(store, tables, key):
    entries = [step(1, payload=b'"first"')]
    assert store.runs.record(key, entries)
    before = tables.journal()

    assert store.runs.record(key, entries)
    assert store.runs.record(key, [step(1, payload=b'"other"')])  # what is there first stays
    assert tables.journal() == before


# -- sleeps ----------------------------------------------------------------------------------------


def test_a_short_sleep_is_journaled_under_the_lease(store, tables, key):
    due = store.now() + timedelta(seconds=0.5)

    assert store.runs.record_sleep(key, [step(1), sleep(2, "nap")], Due(at=due)) == due

    entry = tables.journal()[1]
    assert (entry["kind"], entry["name"]) == ("sleep", "nap")
    assert timedelta(0) <= entry["due_at"] - due < timedelta(milliseconds=1)
    assert (tables.row()["status"], tables.row()["owner"]) == ("running", OWNER)


def test_a_short_sleep_whose_answer_was_lost_keeps_its_time(store, tables, key):
    due = store.now() + timedelta(seconds=0.5)
    store.runs.record_sleep(key, [sleep(1)], Due(at=due))
    before = tables.journal()

    assert store.runs.record_sleep(key, [sleep(1)], Due(at=due)) == due
    assert tables.journal() == before


@pytest.mark.parametrize("seconds", [-86_400, 0, 3_600])
def test_a_sleep_gives_the_execution_up_until_it_is_due(store, tables, key, seconds):
    due_at = store.runs.park(key, Due(seconds=seconds), entries=[step(1), sleep(2, "nap")])

    row = tables.row()
    assert (row["status"], row["owner"], row["sends"], row["token"]) == ("sleeping", None, 0, 1)
    assert row["wake_at"] == due_at
    assert abs((due_at - store.now()).total_seconds() - seconds) < 10
    assert [(entry["kind"], entry["due_at"]) for entry in tables.journal()] == [
        ("step", None),
        ("sleep", due_at),
    ]


def test_a_sleep_until_an_instant_is_due_then(store, tables, key):
    instant = store.now() + timedelta(days=1, microseconds=1)
    due_at = store.runs.park(key, Due(at=instant), entries=[sleep(1)])

    assert timedelta(0) <= due_at - instant < timedelta(milliseconds=1)
    assert tables.journal()[0]["due_at"] == tables.row()["wake_at"] == due_at


def test_a_sleep_that_is_parked_again_keeps_the_journal_and_counts_as_no_progress(store, tables, key):
    store.runs.record(key, [step(1)])
    due_at = store.runs.park(key, Due(seconds=3_600), entries=[sleep(2)])
    tables.send_wake()
    key = claimed(store, wake()).key
    tables.put(crashes=1)
    before = tables.journal()

    assert store.runs.park(key, Due(at=due_at)) == due_at
    assert tables.journal() == before
    assert (tables.row()["wake_at"], tables.row()["crashes"]) == (due_at, 1)


def test_a_park_clears_the_mark_of_a_worker_that_is_stopping(store, tables, key):
    store.leases.mark_draining([key])
    store.runs.park(key, Due(seconds=60), entries=[sleep(1)])

    assert tables.row()["draining"] is False


@pytest.mark.report("racing-arms")
@pytest.mark.parametrize("seconds", [60, None])
def test_a_park_whose_answer_was_lost_is_accepted_when_it_is_tried_again(store, tables, key, seconds):
    due = Due(seconds=60) if seconds else Due(at=store.now() + timedelta(seconds=60))
    due_at = store.runs.park(key, due, entries=[sleep(1)])
    before = tables.everything()

    again = store.runs.park(key, due, entries=[sleep(1)])

    assert abs(again - due_at) < timedelta(milliseconds=1)
    assert tables.everything() == before


def test_a_park_tried_again_after_its_wake_was_sent_is_accepted_and_leaves_the_wake_on_its_way(
    store, tables, key
):
    due = Due(at=store.now())
    store.runs.park(key, due, entries=[sleep(1)])
    tables.send_wake()
    before = tables.everything()

    assert store.runs.park(key, due, entries=[sleep(1)]) == due.at
    assert tables.everything() == before


def test_a_park_tried_again_when_somebody_runs_the_task_is_refused(store, tables, key):
    store.runs.park(key, Due(), entries=[sleep(1)])
    claimed(store, wake(), OTHER)
    before = tables.everything()

    assert store.runs.park(key, Due(), entries=[sleep(1)]) is None
    assert tables.everything() == before


@pytest.mark.parametrize("meanwhile", ["handed back", "cancelled", "set aside"])
def test_a_lease_that_was_given_up_otherwise_is_no_park(store, tables, key, meanwhile):
    {
        "handed back": lambda: store.leases.hand_back(key),
        "cancelled": lambda: store.verdicts.cancel(["id"]),
        "set aside": lambda: store.runs.set_aside(key),
    }[meanwhile]()
    before = tables.everything()

    assert store.runs.park(key, Due(), entries=[sleep(1)]) is None
    assert tables.everything() == before


# -- retries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True])
def test_a_retry_waits_with_a_new_message_and_keeps_the_journal_unless_its_arguments_changed(
    store, tables, key, restart
):
    store.runs.record(key, [step(1)])
    tables.put(crashes=2)

    assert store.runs.park(key, Due(seconds=60), status=Status.RETRYING, message=NEW_MESSAGE, restart=restart)

    row = tables.row()
    assert {name: row[name] for name in MESSAGE.__slots__} == {
        name: getattr(NEW_MESSAGE, name) for name in MESSAGE.__slots__
    }
    assert (row["status"], row["message_version"], row["crashes"]) == ("retrying", 1, 0)
    assert (row["send_id"], row["nesting"], row["task_name"]) == ("send-1", 0, "proj.task")
    assert len(tables.journal()) == (0 if restart else 1)


def test_the_message_from_before_a_retry_is_an_old_one(store, tables, key):
    store.runs.park(key, Due(), status=Status.RETRYING, message=NEW_MESSAGE)
    tables.send_wake()

    assert refused(store, wake()) == refused(store, delivery()) == "an old message"
    assert claimed(store, wake(version=1)).key.token == 2


def test_a_retry_whose_answer_was_lost_counts_once(store, tables, key):
    for _ in range(2):
        assert store.runs.park(key, Due(seconds=60), status=Status.RETRYING, message=NEW_MESSAGE)

    assert tables.row()["message_version"] == 1


def test_a_new_journal_may_begin_with_the_entries_of_the_same_write(store, tables, key):
    store.runs.record(key, [step(1, "old"), step(2, "old")])
    store.runs.park(key, Due(), entries=[sleep(1, "new")], message=NEW_MESSAGE, restart=True)

    assert [(entry["position"], entry["name"]) for entry in tables.journal()] == [(1, "new")]


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outcome",
    [
        VALUE,
        FAILURE,
        Outcome(OutcomeKind.VALUE),
        Outcome(OutcomeKind.VALUE, None, b"\x00\xff\xfe", "application/x-python-serialize", "binary"),
        Outcome(OutcomeKind.VALUE, None, "grün \U0001f980 \x00".encode(), "text/plain", "utf-8"),
        Outcome(OutcomeKind.VALUE, None, b"x" * 3_000_000, "text/plain", "utf-8"),
        Outcome(OutcomeKind.IGNORED, "Ignore"),
    ],
    ids=lambda outcome: f"{outcome.kind}-{len(outcome.payload or b'')}",
)
def test_the_outcome_is_journaled_to_the_byte_and_the_lease_extended(store, tables, key, outcome):
    tables.put(crashes=2)
    assert store.runs.end(key, outcome, 2 * TTL) == Ended((), ())

    row = tables.row()
    assert (row["status"], row["owner"], row["token"], row["crashes"]) == ("ending", OWNER, 1, 0)
    assert tables.due_in() > TTL
    assert row["finished_at"] is None
    assert store.leases.lost_to(key) == outcome


def test_failures_that_were_handled_are_journaled_with_the_outcome(store, tables, key):
    store.runs.end(key, VALUE, TTL, entries=[JournalEntry(1, Kind.ERROR, "pay", payload=b"{}")])

    assert [entry["kind"] for entry in tables.journal()] == ["error"]


def test_an_end_whose_answer_was_lost_is_accepted_and_the_first_outcome_stays(store, tables, key):
    store.runs.end(key, VALUE, TTL, followers=[follower("next")])
    before = tables.all()

    # Its followers are rows already: the scheduler sends what could not be sent at once.
    assert store.runs.end(key, FAILURE, TTL, followers=[follower("next")]) == Ended((), ())
    assert tables.all() == before


def test_a_run_of_which_nobody_is_told_ends_in_one_write(store, tables, key):
    store.leases.mark_draining([key])
    assert store.runs.close(key, UNTOLD, entries=[step(1)]) == Ended((), ())

    row = tables.row()
    assert (row["status"], row["wake_at"], row["owner"], row["token"]) == ("succeeded", None, None, 1)
    assert (row["sends"], row["draining"]) == (0, False)
    assert row["finished_at"] is not None
    assert store.queries.get("id").outcome == UNTOLD
    assert [entry["kind"] for entry in tables.journal()] == ["step"]
    assert not store.verdicts.cancel(["id"])


def test_its_followers_are_rows_with_the_same_write(store, tables, key):
    ended = store.runs.close(key, UNTOLD, followers=[follower("next")])

    assert [outgoing.key for outgoing in ended.outgoing] == ["next"]
    assert (tables.row("next")["status"], tables.row()["status"]) == ("scheduled", "succeeded")


def test_a_close_whose_answer_was_lost_is_accepted_when_it_is_tried_again(store, tables, key):
    store.runs.close(key, UNTOLD, followers=[follower("next")])
    before = tables.all()

    assert store.runs.close(key, UNTOLD, followers=[follower("next")]) == Ended((), ())
    assert tables.all() == before


def test_a_close_tried_again_when_the_id_has_begun_anew_is_refused(store, tables, key):
    store.runs.close(key, UNTOLD)
    claimed(store, replace(delivery(), send_id="another send"), OTHER)
    before = tables.everything()

    assert store.runs.close(key, UNTOLD) is None
    assert tables.everything() == before


def test_completing_after_a_cancel_is_refused_and_cancelling_after_completion_too(store, tables, key):
    assert store.runs.end(key, VALUE, TTL) is not None
    assert not store.verdicts.cancel(["id"])
    assert store.leases.lost_to(key) == VALUE

    other = claimed(store, delivery("other")).key
    store.verdicts.cancel(["other"])
    assert store.runs.end(other, VALUE, TTL) is None
    assert store.leases.lost_to(other) == CANCELLED


@pytest.mark.parametrize("status", sorted(Status.ENDED))
def test_a_row_ends_when_its_outcome_was_told(store, tables, key, status):
    store.runs.end(key, VALUE, TTL)
    store.leases.mark_draining([key])

    assert store.runs.finish(key, status)

    row = tables.row()
    assert (row["status"], row["wake_at"], row["owner"], row["draining"]) == (status, None, None, False)
    assert row["finished_at"] is not None
    assert row["token"] == 1


@pytest.mark.report("one-outcome")
def test_finishing_twice_keeps_the_first_status(store, tables, key):
    store.runs.end(key, VALUE, TTL)
    assert store.runs.finish(key, Status.SUCCEEDED)
    before = tables.everything()

    assert not store.runs.finish(key, Status.FAILED)
    assert tables.everything() == before


def test_a_task_that_replaced_itself_ends_without_an_outcome(store, tables, key):
    assert store.runs.finish(key, Status.REPLACED)
    assert (tables.row()["status"], tables.row()["outcome"]) == ("replaced", None)


def test_a_task_that_diverged_is_parked_for_good_and_keeps_everything(store, tables, key):
    store.runs.record(key, [step(1)])
    tables.put(crashes=1)
    assert store.runs.set_aside(key)

    row = tables.row()
    assert (row["status"], row["wake_at"], row["owner"], row["outcome"]) == ("quarantined", None, None, None)
    assert (row["body"], row["finished_at"]) == (MESSAGE.body, None)
    assert len(tables.journal()) == 1
    assert refused(store, wake()) == "it is quarantined"


# -- followers -------------------------------------------------------------------------------------


def test_a_durable_follower_is_an_execution_that_was_sent_once_and_is_due_again_in_ten_seconds(
    store, tables, key
):
    ended = store.runs.end(key, VALUE, TTL, followers=[follower("next", send_id="s", nesting=1)])

    row = tables.row("next")
    assert (row["status"], row["sends"], row["token"], row["owner"]) == ("scheduled", 1, 0, None)
    assert (row["send_id"], row["nesting"], row["body"]) == ("s", 1, MESSAGE.body)
    assert 5 < tables.due_in("next") <= 10
    (outgoing,) = ended.outgoing
    assert (outgoing.key, outgoing.status, outgoing.sends, outgoing.send_id) == ("next", "scheduled", 1, "s")
    assert outgoing.taken_until == row["wake_at"]
    assert outgoing.message == MESSAGE


def test_a_plain_follower_is_a_message_under_a_key_of_its_own(store, tables, key):
    ended = store.runs.end(key, VALUE, TTL, followers=[follower("plain", durable=False)])

    assert tables.row("plain") is None
    row = tables.row("key-of-plain")
    assert (row["status"], row["sends"], row["token"]) == ("outbox", 1, 0)
    assert ended.outgoing[0].status == Status.OUTBOX
    assert ended.outgoing[0].taken_until == row["wake_at"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_follower_with_a_countdown_waits_for_it_and_is_not_sent_now(store, tables, key, durable):
    item = follower("next", durable=durable, due=Due(seconds=3_600))
    ended = store.runs.end(key, VALUE, TTL, followers=[item])

    assert ended == Ended((), ())
    assert tables.row(item.key)["sends"] == 0
    assert tables.due_in(item.key) > 3_500


def test_what_the_worker_sends_at_once_is_not_taken_by_a_scheduler_meanwhile(store, key):
    store.runs.end(key, VALUE, TTL, followers=[follower("next"), follower("plain", durable=False)])

    assert store.due.take(10, lambda name: (3, TTL)).outgoing == ()


@pytest.mark.parametrize("durable", [True, False])
def test_what_the_worker_has_sent_is_confirmed_like_a_scheduler_s(store, tables, key, durable):
    item = follower("next", durable=durable)
    ended = store.runs.end(key, VALUE, TTL, followers=[item])
    store.due.confirm(ended.outgoing, 120.0)

    if durable:
        assert 110 < tables.due_in("next") <= 120
    else:
        assert tables.row(item.key) is None


def test_a_follower_whose_id_is_taken_is_refused_and_the_end_is_accepted(store, tables, key):
    claimed(store, delivery("busy"))
    asleep(store, "asleep")
    before = tables.everything("busy"), tables.everything("asleep")
    items = [follower(name, send_id="send-2") for name in ("busy", "asleep", "free")]

    ended = store.runs.end(key, VALUE, TTL, followers=items)

    assert [(item.key, refusal.is_fresh_send) for item, refusal in ended.refused] == [
        ("busy", True),
        ("asleep", True),
    ]
    assert all(isinstance(refusal, Refusal) for _, refusal in ended.refused)
    assert [outgoing.key for outgoing in ended.outgoing] == ["free"]
    assert (tables.row("busy"), tables.row("asleep")) == (before[0][0], before[1][0])
    assert tables.row()["status"] == "ending"


def test_a_follower_may_take_the_id_of_a_task_that_has_ended(store, tables, key):
    old = claimed(store, delivery("next")).key
    store.runs.end(old, VALUE, TTL)
    store.runs.finish(old, Status.SUCCEEDED)

    store.runs.end(key, VALUE, TTL, followers=[follower("next", send_id="send-2")])

    assert (tables.row("next")["status"], tables.row("next")["token"]) == ("scheduled", 1)
    assert claimed(store, wake("next", send_id="send-2")).key.token == 2


def test_a_follower_that_was_cancelled_before_is_sent_only_to_say_so(store, tables, key):
    store.verdicts.cancel(["next"])
    store.runs.end(key, VALUE, TTL, followers=[follower("next")])

    assert claimed(store, wake("next")).outcome == Outcome(OutcomeKind.CANCELLED)


def test_many_followers_are_written_with_one_end_or_not_at_all(store, tables, key):
    items = [follower(f"task-{n}", durable=n % 2 == 0) for n in range(50)]
    assert not store.runs.end(replace(key, token=9), VALUE, TTL, followers=items)
    assert len(tables.all()) == 1

    ended = store.runs.end(key, VALUE, TTL, followers=items)
    assert [outgoing.key for outgoing in ended.outgoing] == [item.key for item in items]
    assert len({outgoing.taken_until for outgoing in ended.outgoing}) == 1
    assert len(tables.all()) == 51


def test_an_end_that_fails_half_way_writes_nothing(store, tables, key):
    broken = follower("plain", durable=False)
    store.runs.end(key, VALUE, TTL, followers=[])
    other = claimed(store, delivery("other")).key
    before = tables.all()

    # The key of a plain message exists already, which no uuid ever does.
    with pytest.raises(Exception, match=r"(?i)unique"):
        store.runs.end(other, VALUE, TTL, followers=[follower("next"), broken, broken])
    assert tables.all() == before


# -- what goes over the wire -------------------------------------------------------------------------


def test_the_life_of_a_task_takes_few_statements_on_postgresql(postgres_url):
    store = Store(postgres_url, namespace="proj")
    statements = Statements(store)
    keys = []

    assert statements.during(lambda: keys.append(claimed(store).key)) == ["INSERT"]
    assert statements.during(lambda: store.runs.record(keys[0], [step(1)])) == ["WITH"]
    assert statements.during(lambda: store.runs.park(keys[0], Due(), entries=[sleep(2)])) == ["WITH"]
    assert statements.during(lambda: store.due.take(1, lambda name: (3, TTL)))[:2] == ["BEGIN", "SELECT"]
    assert statements.during(lambda: keys.append(claimed(store, wake()).key)) == ["WITH"]
    assert statements.during(lambda: store.runs.end(keys[1], VALUE, TTL)) == ["UPDATE"]
    assert statements.during(lambda: store.runs.finish(keys[1], Status.SUCCEEDED)) == ["UPDATE"]
    other = claimed(store, delivery("other")).key
    assert statements.during(lambda: store.runs.close(other, UNTOLD)) == ["UPDATE"]


def test_the_life_of_a_task_takes_few_statements_on_sqlite(sqlite_url):
    store = Store(sqlite_url, namespace="proj")
    statements = Statements(store)
    keys = []

    assert statements.during(lambda: keys.append(claimed(store).key)) == ["INSERT"]
    assert statements.during(lambda: store.runs.record(keys[0], [step(1)])) == [
        "BEGIN",
        "UPDATE",
        "INSERT",
        "COMMIT",
    ]
    assert statements.during(lambda: store.runs.park(keys[0], Due(), entries=[sleep(2)])) == [
        "BEGIN",
        "UPDATE",
        "INSERT",
        "COMMIT",
    ]
    store.due.take(1, lambda name: (3, TTL))
    assert statements.during(lambda: keys.append(claimed(store, wake()).key)) == [
        "BEGIN",
        "SELECT",
        "UPDATE",
        "SELECT",
        "COMMIT",
    ]
    assert statements.during(lambda: store.runs.end(keys[1], VALUE, TTL)) == ["UPDATE"]
    assert statements.during(lambda: store.runs.finish(keys[1], Status.SUCCEEDED)) == ["UPDATE"]


def live(store, task_id):
    """A life with all that there is in it."""
    key = claimed(store, delivery(task_id)).key
    store.leases.renew([key, replace(key, token=7)], TTL)
    store.runs.record(key, [step(1)])
    store.runs.record(key, [step(2), step(3)])
    store.runs.record(key, [step(n) for n in range(4, 5 + FEW)])
    store.runs.record_sleep(key, [sleep(20)], Due(at=store.now()))
    store.runs.park(key, Due(), entries=[sleep(21)])
    store.due.confirm(store.due.take(1, lambda name: (3, TTL)).outgoing, 120.0)
    key = claimed(store, wake(task_id)).key
    store.runs.park(key, Due(), status=Status.RETRYING, message=NEW_MESSAGE)
    store.due.take(1, lambda name: (3, TTL))
    key = claimed(store, wake(task_id, version=1)).key
    store.leases.hand_back(key)
    key = claimed(store, wake(task_id, version=1)).key
    followers = [follower(f"after-{task_id}"), follower(f"plain-{task_id}", durable=False)]
    store.runs.end(key, VALUE, TTL, followers=followers)
    store.runs.finish(key, Status.SUCCEEDED)
    key = claimed(store, delivery(f"unheard-{task_id}")).key
    store.runs.close(key, UNTOLD, entries=[step(1)])


def test_every_statement_is_compiled_once(store):
    live(store, "first")
    statements = Statements(store)

    statements.during(lambda: live(store, "second"))

    assert statements.compiled == []


NOTE_COMMITS = """
CREATE TABLE commits (setting text);
CREATE FUNCTION note_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO commits VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER note_commit AFTER INSERT OR UPDATE ON durable_executions
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note_commit();
"""
FORGET_COMMITS = "DROP TABLE commits; DROP FUNCTION note_commit() CASCADE"


def test_what_only_notes_that_an_outcome_was_told_does_not_wait_for_the_disk_and_all_else_does(postgres_url):
    """Lost in a crash of the database, it is told again; a lost claim, step or outcome is not made good."""
    store = Store(postgres_url, namespace="proj")
    with store.database.transaction() as connection:
        connection.exec_driver_sql(NOTE_COMMITS)
    try:
        key = claimed(store).key
        assert store.runs.record(key, [step(1)])
        assert store.runs.end(key, Outcome(OutcomeKind.VALUE), TTL)
        assert store.runs.finish(key, Status.SUCCEEDED)
        assert store.runs.close(claimed(store, delivery("unheard")).key, UNTOLD)
        with store.database.statements() as connection:
            settings = connection.exec_driver_sql("SELECT setting FROM commits").scalars().all()
    finally:
        with store.database.transaction() as connection:
            connection.exec_driver_sql(FORGET_COMMITS)

    assert settings == ["on", "on", "on", "off", "on", "on"]
