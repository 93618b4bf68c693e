"""Where a run may be interrupted: in its own body, and nowhere else."""

from __future__ import annotations

import threading

import pytest

from celery_durable.errors import LeaseInterrupt, LeaseLost
from celery_durable.shield import Shield


class Limit(Exception):
    """Another reason to interrupt: a soft time limit."""


class Interpreter:
    """Takes the place of the interpreter's way to raise an exception in another thread."""

    def __init__(self):
        self.raised = []

    def __call__(self, error):
        self.raised.append(error)


@pytest.fixture
def shield():
    return Shield()


@pytest.fixture
def interpreter():
    return Interpreter()


def interrupt(shield, error=LeaseInterrupt):
    """What a signal handler does."""
    if shield.request(error):
        raise error


def ask_from_outside(shield, interpreter, error=LeaseInterrupt):
    """What another thread does."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(shield.request_from_outside(error, interpreter)))
    thread.start()
    thread.join()
    return answers[0]


# -- before the body ---------------------------------------------------------------------------------


def test_a_body_that_is_not_to_begin_does_not(shield):
    shield.forestall(LeaseInterrupt)
    with pytest.raises(LeaseInterrupt):
        shield.run(lambda: pytest.fail("it has begun"))
    assert not shield.in_body


def test_a_body_that_has_begun_is_not_forestalled(shield):
    assert shield.run(lambda: shield.forestall(LeaseInterrupt) or "value") == "value"


# -- from the run's own thread -----------------------------------------------------------------------


def test_an_interrupt_of_the_body_is_raised_at_once(shield):
    with pytest.raises(LeaseInterrupt):
        shield.run(lambda: interrupt(shield))


def test_before_and_after_the_body_nothing_is_raised(shield):
    interrupt(shield)
    assert shield.run(lambda: 7) == 7
    interrupt(shield)

    assert not shield.in_body


def test_what_the_body_raises_itself_leaves_it(shield):
    with pytest.raises(ZeroDivisionError):
        shield.run(lambda: 1 // 0)
    assert not shield.in_body


def test_inside_a_stretch_of_ours_an_interrupt_waits_for_its_end(shield):
    done = []

    def body():
        with shield.closed():
            interrupt(shield)
            done.append("written")
        done.append("never reached")

    with pytest.raises(LeaseInterrupt):
        shield.run(body)
    assert done == ["written"]


def test_stretches_inside_stretches_are_one(shield):
    done = []

    def body():
        with shield.closed():
            with shield.closed():
                interrupt(shield)
            done.append("inner")
        done.append("never reached")

    with pytest.raises(LeaseInterrupt):
        shield.run(body)
    assert done == ["inner"]


def test_after_a_stretch_the_body_can_be_interrupted_again(shield):
    def body():
        with shield.closed():
            pass
        interrupt(shield)

    with pytest.raises(LeaseInterrupt):
        shield.run(body)


def test_an_error_of_the_stretch_does_not_take_the_interrupt_away(shield):
    """The body may handle the error: it would go on as if nobody had asked."""

    def body():
        try:
            with shield.closed():
                interrupt(shield)
                raise LeaseLost("id", 1, "refused")
        except LeaseLost:
            return "went on"

    with pytest.raises(LeaseInterrupt) as raised:
        shield.run(body)
    assert isinstance(raised.value.__context__, LeaseLost)


def test_an_error_of_the_stretch_without_an_interrupt_is_itself(shield):
    def body():
        with shield.closed():
            raise LeaseLost("id", 1, "refused")

    with pytest.raises(LeaseLost):
        shield.run(body)


def test_an_interrupt_is_raised_once(shield):
    def body():
        with pytest.raises(LeaseInterrupt), shield.closed():
            interrupt(shield)
        with shield.closed():
            pass
        return "swallowed it"

    assert shield.run(body) == "swallowed it"


def test_the_last_reason_is_the_one_that_is_raised(shield):
    def body():
        with shield.closed():
            interrupt(shield, Limit)
            interrupt(shield, LeaseInterrupt)

    with pytest.raises(LeaseInterrupt):
        shield.run(body)


def test_a_stretch_outside_of_a_body_is_an_ordinary_block(shield):
    with shield.closed():
        interrupt(shield)


def test_what_was_asked_for_in_a_stretch_that_outlives_the_body_is_dropped(shield):
    stretch = shield.closed()

    def body():
        stretch.__enter__()
        interrupt(shield)

    shield.run(body)
    stretch.__exit__(None, None, None)


# -- from another thread -------------------------------------------------------------------------------


def test_from_outside_the_body_is_interrupted_by_the_interpreter(shield, interpreter):
    assert shield.run(lambda: ask_from_outside(shield, interpreter))
    assert interpreter.raised == [LeaseInterrupt, None]  # it had not arrived, and is withdrawn at the end


def test_from_outside_there_is_nothing_to_interrupt_when_the_body_is_over(shield, interpreter):
    assert not ask_from_outside(shield, interpreter)
    shield.run(lambda: None)
    assert not ask_from_outside(shield, interpreter)
    assert interpreter.raised == []


def test_from_outside_an_interrupt_waits_for_the_end_of_a_stretch_too(shield, interpreter):
    def body():
        with shield.closed():
            assert ask_from_outside(shield, interpreter)
            assert interpreter.raised == []

    with pytest.raises(LeaseInterrupt):
        shield.run(body)


def test_an_interrupt_that_has_not_arrived_when_a_stretch_begins_is_raised_at_its_end(shield, interpreter):
    def body():
        ask_from_outside(shield, interpreter)
        with shield.closed():
            assert interpreter.raised == [LeaseInterrupt, None]

    with pytest.raises(LeaseInterrupt):
        shield.run(body)


def test_an_interrupt_that_arrives_when_the_body_has_ended_is_dropped_and_its_value_stands(shield):
    """The interpreter raises it at any moment: here in the last lines of the shield."""
    arrived = []

    def late(error):
        if error is None and not arrived:
            arrived.append(True)
            raise LeaseInterrupt

    def body():
        ask_from_outside(shield, late)
        return 42

    assert shield.run(body) == 42
    assert arrived
    assert not shield.in_body


def test_another_error_in_the_last_lines_is_not_taken_for_an_interrupt(shield):
    def broken(error):
        if error is None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shield.run(lambda: ask_from_outside(shield, broken))


def test_a_body_that_is_held_cannot_end(shield):
    held, release, ended = threading.Event(), threading.Event(), threading.Event()

    def hold():
        with shield.frozen() as in_body:
            assert in_body
            held.set()
            release.wait(5)

    def body():
        threading.Thread(target=hold).start()
        held.wait(5)

    def run():
        Shield.run(shield, body)
        ended.set()

    runner = threading.Thread(target=run)
    runner.start()
    assert held.wait(5)
    assert not ended.wait(0.05)
    release.set()
    assert ended.wait(5)
    runner.join()


def test_a_shield_knows_the_thread_of_its_run(shield):
    assert shield.thread_id == threading.get_ident()
