"""Snapshots of journals, and new code held against an old one."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import date, timedelta

import pytest

from celery_durable import DurableTask, ExecutionNotFound, ReplayDivergence, sleep, step
from celery_durable.testing import DurableClock, Entry, Journal
from celery_durable.testing.app import durable_app as new_app


class Declined(Exception):
    pass


def has_paid(user_id):
    return {"user": user_id, "since": date(2026, 1, 1)}


def charge(user_id):
    raise Declined(user_id)


def send_mail(user_id):
    raise AssertionError("a replay does nothing again")


def body(user_id):
    paid = step(has_paid, user_id)
    with suppress(Declined):
        step(charge, user_id)
    sleep(days=3, name="trial")
    return paid


def without_steps(user_id):
    sleep(days=3, name="trial")


def without_charge(user_id):
    step(has_paid, user_id)
    sleep(days=3, name="trial")


def too_short(user_id):
    step(has_paid, user_id)


@pytest.fixture
def define(durable_app):
    """Makes a durable task of a function."""

    def define(function, **options):
        return durable_app.task(base=DurableTask, name=f"task-{len(durable_app.tasks)}", **options)(function)

    return define


@pytest.fixture
def journal(define, durable_clock):
    result = define(body).delay(7)
    durable_clock.drain()
    return durable_clock.journal(result)


class TestSnapshot:
    def test_what_is_in_it(self, durable_clock, journal):
        assert (journal.args, journal.kwargs) == ((7,), {})
        assert [(entry.position, entry.kind, entry.name) for entry in journal] == [
            (1, "step", "has_paid"),
            (2, "error", "charge"),
            (3, "sleep", "trial"),
        ]
        assert journal[0] == Entry(1, "step", "has_paid", {"user": 7, "since": date(2026, 1, 1)})
        assert isinstance(journal[1].value, Declined)
        assert journal[2].due == durable_clock.now() + timedelta(days=3)

    def test_it_reads_as_text(self, journal):
        assert str(journal).splitlines()[1:] == [
            "1 step has_paid: {'user': 7, 'since': datetime.date(2026, 1, 1)}",
            "2 error charge: Declined(7)",
            f"3 sleep trial until {journal[2].due}",
        ]

    def test_it_stays_as_it_was(self, durable_clock, journal):
        durable_clock.advance(days=3)
        assert len(journal) == 3

    def test_of_a_task_that_there_is_not(self, durable_clock):
        with pytest.raises(ExecutionNotFound):
            durable_clock.journal("nobody")

    def test_a_file_keeps_all_of_it(self, durable_app, durable_clock, journal, tmp_path):
        journal.save(tmp_path / "journal.json")
        loaded = durable_clock.load_journal(tmp_path / "journal.json")

        assert (loaded.task, loaded.args, loaded.kwargs) == (journal.task, journal.args, journal.kwargs)
        assert str(loaded) == str(journal)
        assert loaded[0] == journal[0]
        content = json.loads((tmp_path / "journal.json").read_text())
        assert [entry["name"] for entry in content["entries"]] == ["has_paid", "charge", "trial"]

    @pytest.mark.parametrize("text", ["[]", '{"format": 99}', "{}"])
    def test_another_file_is_refused(self, durable_clock, tmp_path, text):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match="no journal"):
            durable_clock.load_journal(tmp_path / "other.json")

    def test_values_of_a_binary_serializer_keep_too(self, tmp_path):
        app = new_app()

        @app.task(base=DurableTask, name="packed")
        def packed():
            step(bytes, [1, 255])
            sleep(days=1)

        with DurableClock(app, {"durable_serializer": "pickle"}) as clock:
            result = packed.delay()
            clock.drain()
            clock.journal(result).save(tmp_path / "journal.json")
            assert clock.load_journal(tmp_path / "journal.json")[0].value == b"\x01\xff"


class TestReplay:
    def test_the_same_code_fits(self, define, durable_clock, journal):
        replayed = durable_clock.replay(define(body), journal)
        assert replayed.value == {"user": 7, "since": date(2026, 1, 1)}
        assert replayed.next_call is None

    def test_more_at_the_end_fits_and_is_not_done(self, define, durable_clock, journal):
        def longer(user_id):
            body(user_id)
            step(send_mail, user_id)

        task = define(longer)
        assert durable_clock.replay(task, journal).next_call == "step 'send_mail'"
        assert durable_clock.sent == []

    @pytest.mark.parametrize(("changed", "position"), [(without_steps, 1), (without_charge, 2)])
    def test_another_call_diverges(self, define, durable_clock, journal, changed, position):
        with pytest.raises(ReplayDivergence) as raised:
            durable_clock.replay(define(changed), journal)
        assert raised.value.position == position

    def test_a_divergence_cannot_be_swallowed(self, define, durable_clock, journal):
        went_on = []

        def careless(user_id):
            with suppress(Exception):
                step(send_mail, user_id)
            step(charge, user_id)
            went_on.append(user_id)

        with pytest.raises(ReplayDivergence, match="send_mail"):
            durable_clock.replay(define(careless), journal)
        assert went_on == []

    def test_a_body_that_ends_too_early(self, define, durable_clock, journal):
        with pytest.raises(AssertionError, match="ends after 1 durable calls.*step 'charge' at position 2"):
            durable_clock.replay(define(too_short), journal)

    def test_an_exception_of_the_body_is_the_test_s(self, define, durable_clock, journal):
        def broken(user_id):
            step(has_paid, user_id)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            durable_clock.replay(define(broken), journal)

    def test_nothing_is_sent_by_a_replay(self, durable_app, define, durable_clock, journal):
        def sends(user_id):
            durable_app.send_task("elsewhere")
            return body(user_id)

        durable_clock.replay(define(sends), journal)
        durable_clock.drain()
        assert durable_clock.sent == []

    def test_the_request_is_that_of_the_task(self, define, durable_clock, journal):
        def curious(self, user_id):
            body(user_id)
            return self.request.id

        assert durable_clock.replay(define(curious, bind=True), journal).value == journal.task_id

    def test_a_plain_task_has_no_journal(self, durable_app, durable_clock, journal):
        plain = durable_app.task(name="plain")(body)
        with pytest.raises(TypeError, match="plain.*no durable task"):
            durable_clock.replay(plain, journal)

    def test_a_journal_can_be_taken_without_the_clock(self, durable_app, durable_clock, journal):
        assert str(Journal.of(durable_app, journal.task_id)) == str(journal)
