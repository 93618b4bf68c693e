"""Several connections at one row: exactly one is answered yes, and a lost answer does no harm."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import insert, text, update

from celery_durable.errors import StoreUnavailable
from celery_durable.records import Claim, Due, LeaseKey, Outcome, OutcomeKind, Refusal, Scheduled, Status
from celery_durable.store import Store
from tests.nodes import FaultProxy, wait_for
from tests.store.tables import (
    OTHER,
    OWNER,
    TTL,
    Tables,
    asleep,
    claim,
    claimed,
    delivery,
    follower,
    sleep,
    step,
    wake,
)

VALUE = Outcome(OutcomeKind.VALUE, None, b"42", "application/json", "utf-8")
RIVALS = 8


@pytest.fixture
def at_once(open_store):
    """Calls `work(store, number)` in many threads at the same moment, each with connections of its own."""
    stores = [open_store() for _ in range(RIVALS)]
    for rival in stores:
        rival.now()
    barrier = threading.Barrier(RIVALS)
    with ThreadPoolExecutor(RIVALS) as pool:

        def start(work):
            def run(number):
                barrier.wait(20)
                return work(stores[number], number)

            return list(pool.map(run, range(RIVALS)))

        yield start


@pytest.fixture
def proxy(postgres_url):
    with FaultProxy(postgres_url) as proxy:
        yield proxy


@pytest.fixture
def far(proxy):
    """A store whose answers can be cut off."""
    store = Store(proxy.url, namespace="proj")
    yield store
    store.dispose()


@pytest.fixture
def near(postgres_url):
    store = Store(postgres_url, namespace="proj")
    yield store
    store.dispose()


def owner(number):
    return f"celery@host:{number}:abc"


def granted(answers):
    return [answer for answer in answers if isinstance(answer, Claim)]


# -- one claim -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "with expires", "with a past eta"])
def test_of_many_copies_of_a_new_message_one_opens_the_execution(at_once, store, tables, kind):
    now = store.now()
    options = {
        "plain": {},
        "with expires": {"expires": now + timedelta(hours=1)},
        "with a past eta": {"eta": now - timedelta(hours=1)},
    }[kind]

    answers = at_once(lambda rival, number: claim(rival, delivery(**options), owner(number)))

    (winner,) = granted(answers)
    assert winner.key.token == 1
    assert sum(isinstance(answer, Refusal) for answer in answers) == RIVALS - 1
    assert (tables.row()["owner"], tables.row()["token"]) == (winner.key.owner, 1)


def test_of_many_copies_with_an_eta_one_row_waits_and_none_is_an_error(at_once, store, tables):
    eta = store.now() + timedelta(hours=1)

    answers = at_once(lambda rival, _: claim(rival, delivery(eta=eta)))

    assert {type(answer) for answer in answers} <= {Scheduled, Refusal}
    assert sum(isinstance(answer, Scheduled) for answer in answers) == 1
    assert (tables.row()["status"], len(tables.all())) == ("scheduled", 1)


def test_of_different_sends_under_one_new_id_one_is_let_in(at_once, tables):
    answers = at_once(lambda rival, number: claim(rival, delivery(send_id=f"send-{number}")))

    assert len(granted(answers)) == 1
    assert all(answer.is_fresh_send for answer in answers if isinstance(answer, Refusal))


def test_a_lease_that_ran_out_is_taken_over_once(at_once, store, tables):
    claimed(store)
    tables.expire()

    (winner,) = granted(at_once(lambda rival, number: claim(rival, wake(), owner(number))))

    assert (winner.key.token, winner.crashes) == (2, 1)
    assert (tables.row()["token"], tables.row()["crashes"]) == (2, 1)


def test_a_wake_and_its_copies_and_the_first_message_wake_a_task_once(at_once, store, tables):
    asleep(store, "id", 0.0)
    tables.send_wake()

    answers = at_once(lambda rival, number: claim(rival, wake() if number % 2 else delivery(), owner(number)))

    (winner,) = granted(answers)
    assert winner.key.token == 2
    assert [entry.kind for entry in winner.journal] == ["sleep"]


def test_a_task_that_ended_is_opened_anew_once(at_once, store, tables):
    key = claimed(store).key
    store.runs.end(key, VALUE, TTL)
    store.runs.finish(key, Status.SUCCEEDED)

    answers = at_once(lambda rival, number: claim(rival, delivery(send_id="send-2"), owner(number)))

    assert [answer.key.token for answer in granted(answers)] == [2]


def _rival(store):
    """A connection whose transactions are its own to end."""
    return store.database.engine.execution_options(isolation_level="READ COMMITTED").connect()


@pytest.mark.parametrize("ends_by", ["commit", "rollback"])
def test_a_claim_waits_for_one_that_is_under_way_and_then_decides(near, ends_by):
    store = near
    table = store.context.schema.executions
    with ThreadPoolExecutor(1) as pool, _rival(store) as rival:
        transaction = rival.begin()
        row = {"namespace": "proj", "task_id": "id", "task_name": "t", "status": "running", "token": 1}
        row |= {"owner": OTHER, "wake_at": store.now() + timedelta(seconds=60), "send_id": "send-1"}
        rival.execute(insert(table).values(**row, created_at=store.now(), updated_at=store.now()))
        waiting = pool.submit(claim, store, delivery(expires=store.now() + timedelta(hours=1)))
        wait_for(lambda: _is_somebody_waiting(store))
        getattr(transaction, ends_by)()
        answer = waiting.result(20)

    if ends_by == "commit":
        assert answer == Refusal(f"{OTHER} holds its lease")
    else:
        assert isinstance(answer, Claim)


def _is_somebody_waiting(store):
    with store.database.statements() as connection:
        return connection.execute(
            text(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
        ).scalar_one()


def test_a_wake_that_had_to_wait_sees_the_journal_as_it_is_then(near):
    """Between the look and the lock a whole other run was there: claimed, journaled, parked and woken."""
    store, tables = near, Tables(near)
    asleep(store, "id", 0.0)
    tables.send_wake()
    executions, journal = store.context.schema.executions, store.context.schema.journal
    with ThreadPoolExecutor(1) as pool, _rival(store) as rival:
        transaction = rival.begin()
        rival.execute(update(executions).values(token=2))
        waiting = pool.submit(claim, store, wake())
        wait_for(lambda: _is_somebody_waiting(store))
        rival.execute(
            insert(journal).values(
                namespace="proj",
                task_id="id",
                position=2,
                kind="step",
                name="pay",
                timer_id="",
                payload=b"1",
                recorded_at=store.now(),
            )
        )
        transaction.commit()
        answer = waiting.result(20)

    assert answer.key.token == 3
    assert [entry.position for entry in answer.journal] == [1, 2]


def test_a_take_over_waits_for_a_write_that_is_under_way_and_sees_it(near):
    store, tables = near, Tables(near)
    key = claimed(store).key
    tables.expire()
    with ThreadPoolExecutor(2) as pool, _rival(store) as rival:
        transaction = rival.begin()
        rival.execute(text("SELECT 1 FROM durable_executions FOR UPDATE"))
        written = pool.submit(store.runs.record, key, [step(1)])
        wait_for(lambda: _is_somebody_waiting(store) == 1)
        taken = pool.submit(claim, store, wake(), OTHER)
        wait_for(lambda: _is_somebody_waiting(store) == 2)
        transaction.commit()
        accepted, answer = written.result(20), taken.result(20)

    # Whoever of the two comes first: what was accepted is seen, what was not is not there.
    assert [entry.position for entry in answer.journal] == ([1] if accepted else [])
    assert len(tables.journal()) == len(answer.journal)


# -- one end ---------------------------------------------------------------------------------------


@pytest.mark.report("one-outcome")
@pytest.mark.parametrize("round_", range(20))
def test_a_cancel_that_races_the_end_leaves_exactly_one_outcome(store, open_store, tables, round_):
    rival = open_store()
    key = claimed(store).key
    rival.now()
    barrier = threading.Barrier(2)

    def end():
        barrier.wait(20)
        return store.runs.end(key, VALUE, TTL) is not None

    def cancel():
        barrier.wait(20)
        return bool(rival.verdicts.cancel(["id"]))

    with ThreadPoolExecutor(2) as pool:
        ended, cancelled = (future.result(20) for future in [pool.submit(end), pool.submit(cancel)])

    assert ended != cancelled
    assert store.leases.lost_to(key).kind == (OutcomeKind.VALUE if ended else OutcomeKind.CANCELLED)
    assert store.runs.finish(key, Status.SUCCEEDED) == ended


def test_a_hard_limit_that_races_the_end_leaves_exactly_one_outcome(at_once, store, tables):
    key = claimed(store).key
    limit = Outcome(OutcomeKind.EXCEPTION, "TimeLimitExceeded")

    answers = at_once(
        lambda rival, number: (
            rival.runs.end(key, VALUE, TTL) is not None
            if number == 0
            else rival.leases.take_from_child(key, f"main-{number}", TTL, limit) is not None
        )
    )

    assert sum(answers) == 1
    assert store.leases.lost_to(key) == (VALUE if answers[0] else limit)


def test_a_run_is_finished_once(at_once, store, tables):
    key = claimed(store).key
    store.runs.end(key, VALUE, TTL)

    assert sum(at_once(lambda rival, _: rival.runs.finish(key, Status.SUCCEEDED))) == 1


def test_a_lease_is_given_up_once(at_once, store, tables):
    key = claimed(store).key

    answers = at_once(
        lambda rival, number: rival.leases.recover(key, 3) if number % 2 else rival.leases.hand_back(key)
    )

    assert sum(bool(answer) for answer in answers) == 1
    assert tables.row()["crashes"] == (1 if any(answers[1::2]) else 0)


@pytest.mark.report("lock-out")
def test_two_ends_that_have_each_other_s_followers_are_both_accepted_in_the_end(store, open_store, tables):
    rival = open_store()
    keys = [claimed(store, delivery(name)).key for name in ("one", "two")]
    barrier = threading.Barrier(2)

    def end(holder, key, names):
        barrier.wait(20)
        while True:
            try:
                return holder.runs.end(key, VALUE, TTL, followers=[follower(name) for name in names])
            except StoreUnavailable:  # a deadlock, which the holder tries again like any other
                continue

    with ThreadPoolExecutor(2) as pool:
        names = [f"next-{number}" for number in range(20)]
        futures = [
            pool.submit(end, store, keys[0], names),
            pool.submit(end, rival, keys[1], names[::-1]),
        ]
        ended = [future.result(20) for future in futures]

    assert all(item is not None for item in ended)
    assert [tables.row(name)["sends"] for name in names] == [1] * 20


# -- tokens and positions ----------------------------------------------------------------------------


def test_whatever_the_order_tokens_only_grow_and_each_position_is_written_once(at_once, store, tables):
    """Eight workers fight for one task, which each that gets it journals a step of, and lets go."""
    claimed(store)
    store.leases.hand_back(LeaseKey("id", OWNER, 1))

    def fight(rival, number):
        mine = []
        while len(mine) < 3:
            answer = claim(rival, wake(), owner(number))
            if not isinstance(answer, Claim):
                continue
            position = len(answer.journal) + 1
            assert rival.runs.record(answer.key, [step(position, f"by-{number}")])
            assert rival.leases.hand_back(answer.key)
            mine.append((answer.key.token, position, f"by-{number}"))
        return mine

    done = sorted(item for items in at_once(fight) for item in items)

    assert [token for token, _, _ in done] == list(range(2, 2 + 3 * RIVALS))
    assert [position for _, position, _ in done] == list(range(1, 1 + 3 * RIVALS))
    assert [entry["name"] for entry in tables.journal()] == [name for _, _, name in done]
    assert tables.row()["crashes"] == 0


# -- answers that were lost ----------------------------------------------------------------------------


def lose_answer(proxy, pattern, call):
    """Have a statement committed and its answer lost; then try again, as a holder does."""
    proxy.cut_answer_to(pattern)
    with pytest.raises(StoreUnavailable):
        call()
    assert proxy.cuts_left == 0
    return call()


@pytest.mark.parametrize("count", [1, 20])
def test_a_step_whose_answer_was_lost_is_there_once(proxy, far, near, count):
    key = claimed(far).key
    entries = [step(n) for n in range(1, count + 1)]
    pattern = b"WITH change" if count == 1 else b"COMMIT\0"

    assert lose_answer(proxy, pattern, lambda: far.runs.record(key, entries))
    assert len(Tables(near).journal()) == count


@pytest.mark.report("racing-arms")
def test_a_park_whose_answer_was_lost_has_parked_once(proxy, far, near):
    key = claimed(far).key
    due = Due(at=near.now() + timedelta(hours=1))

    assert lose_answer(proxy, b"WITH change", lambda: far.runs.park(key, due, entries=[sleep(1)])) == due.at
    assert near.queries.get("id").status == "sleeping"


def test_an_end_whose_answer_was_lost_has_ended_once_with_each_follower_once(proxy, far, near):
    key = claimed(far).key
    followers = [follower("next"), follower("plain", durable=False)]

    ended = lose_answer(proxy, b"COMMIT\0", lambda: far.runs.end(key, VALUE, TTL, followers=followers))

    assert ended.outgoing == ()  # they are rows: the scheduler sends them
    assert sorted(row["task_id"] for row in Tables(near).all()) == ["id", "key-of-plain", "next"]
    assert far.runs.finish(key, Status.SUCCEEDED)


def test_a_finish_whose_answer_was_lost_has_finished(proxy, far, near):
    key = claimed(far).key
    far.runs.end(key, VALUE, TTL)

    assert not lose_answer(proxy, b"UPDATE", lambda: far.runs.finish(key, Status.SUCCEEDED))
    assert near.queries.get("id").status == "succeeded"


def test_a_claim_whose_answer_was_lost_is_a_lease_that_runs_out(proxy, far, near):
    """Nobody runs it until then, and nobody loses it."""
    refusal = lose_answer(proxy, b"INSERT", lambda: claim(far, delivery()))

    assert refusal == Refusal(f"{OWNER} holds its lease")
    assert near.queries.get("id").wake_at is not None
