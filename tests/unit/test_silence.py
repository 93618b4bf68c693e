"""A park leaves Celery's tracer without a word, and without a record of the frames that it went through."""

from __future__ import annotations

import logging
import pickle

import pytest
from celery import Celery, signals, states
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Reject

from celery_durable.silence import Silence, quiet_tracer, silent


@pytest.fixture
def app():
    app = Celery("proj", set_as_current=False)
    app.conf.task_ignore_result = True
    yield app
    app.close()


def ended_by(app, error):
    """A task that leaves its body by this exception; None: by a return."""

    @app.task(name="proj.task", shared=False)
    def task():
        if error is not None:
            raise error

    return task


def traced(trace):
    return trace("id", (), {}, {"id": "id"})


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    # Without the seconds that it took.
    return lambda: [record.getMessage().partition(" in ")[0] for record in caplog.records]


def test_a_silence_is_ignored_and_nothing_is_logged_of_it(app, said):
    answer = traced(quiet_tracer(ended_by(app, Silence("it sleeps")), "host"))

    assert answer.info.state == states.IGNORED
    assert isinstance(answer.info.retval, Silence)
    assert said() == []


def test_what_goes_to_the_main_process_is_small_and_can_be_read_there(app):
    answer = traced(quiet_tracer(ended_by(app, Silence("it sleeps")), "host"))

    for record in (answer.retval, silent().retval):
        sent = pickle.dumps(record)
        assert len(sent) < 3000
        assert isinstance(pickle.loads(sent).exception, Silence)
        assert pickle.loads(sent).internal


def test_the_frames_of_the_body_are_not_kept(app):
    try:
        raise RuntimeError("what the body was doing")
    except RuntimeError as error:
        silence = Silence("it sleeps")
        silence.__context__ = error

    answer = traced(quiet_tracer(ended_by(app, silence), "host"))

    assert answer.info.retval.__context__ is None
    names, frame = [], answer.info.retval.__traceback__
    while frame is not None:
        names.append(frame.tb_frame.f_code.co_name)
        frame = frame.tb_next
    assert names == ["_short_traceback"]


def test_the_signals_of_a_run_are_sent_as_for_any_other(app):
    seen = []

    def note(signal, state=None, **_):
        seen.append((signal.name, state))

    signals.task_prerun.connect(note)
    signals.task_postrun.connect(note)
    try:
        traced(quiet_tracer(ended_by(app, Silence()), "host"))
    finally:
        signals.task_prerun.disconnect(note)
        signals.task_postrun.disconnect(note)

    assert seen == [("task_prerun", None), ("task_postrun", states.IGNORED)]


@pytest.mark.parametrize("error", [Ignore("mine"), Reject("mine"), KeyError("mine"), None], ids=repr)
def test_every_other_end_is_what_celery_makes_of_it(app, said, error):
    task = ended_by(app, error)

    quiet = traced(quiet_tracer(task, "host"))
    said_quietly = said()
    plain = traced(build_tracer(task.name, task, app.loader, "host", app=app))

    assert type(quiet.retval) is type(plain.retval)
    assert getattr(quiet.info, "state", None) == getattr(plain.info, "state", None)
    assert said()[len(said_quietly) :] == said_quietly
