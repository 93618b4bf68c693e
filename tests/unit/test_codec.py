"""Journaled values and exceptions: what comes back, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timezone
from decimal import Decimal
from uuid import UUID

import pytest
from kombu.exceptions import ContentDisallowed, DecodeError, EncodeError

from celery_durable.codec import Codec, OutcomeCodec
from celery_durable.errors import PayloadTooLarge, StepFailed

SERIALIZERS = ["json", "pickle", "msgpack", "yaml"]


class Plain(Exception):
    """Rebuilt from its args."""


class Coded(Exception):
    """Takes one argument and keeps more."""

    def __init__(self, code):
        super().__init__(code)
        self.code = code
        self.hint = None


class Picky(Exception):
    """Takes other arguments than it hands to its base, as many exceptions in the wild do."""

    def __init__(self, response, operation):
        super().__init__(f"{operation} failed: {response}")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Outer:
    class Inner(Exception):
        pass


class Opaque:
    """No serializer but pickle takes it."""

    def __eq__(self, other):
        return isinstance(other, Opaque)

    __hash__ = None


def there_and_back(codec, value):
    payload = codec.encode(value)
    return codec.decode(payload.data, payload.content_type, payload.content_encoding)


def replayed(codec, error):
    """What the first run raises, and what a replay raises."""
    payload, first = codec.encode_exception(error)
    again = codec.decode_exception(payload.data, payload.content_type, payload.content_encoding)
    return first, again


def looks(error):
    return type(error), str(error), error.args, vars(error)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("serializer", SERIALIZERS)
@pytest.mark.parametrize(
    "value", [None, True, 0, -1.5, "", "grün \x00 \U0001f980", [], {}, {"a": [1, {"b": None}]}]
)
def test_a_plain_value_comes_back_as_it_was(serializer, value):
    assert there_and_back(Codec(serializer), value) == value


@pytest.mark.parametrize(
    "value",
    [
        datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=timezone.utc),
        Decimal("1.10"),
        UUID("6f0c1a52-5f0e-5d3e-9d42-7f1f3c0f9b11"),
        b"\x00\xff",
    ],
)
def test_json_keeps_what_celery_s_json_keeps(value):
    assert there_and_back(Codec("json"), value) == value


def test_a_first_run_can_be_shown_what_a_replay_will_see():
    assert there_and_back(Codec("json"), {1: (2, 3)}) == {"1": [2, 3]}


def test_pickle_keeps_objects():
    assert there_and_back(Codec("pickle"), [Opaque(), (1, 2), {3}]) == [Opaque(), (1, 2), {3}]


def test_nothing_stored_reads_as_none():
    assert Codec("json").decode(None, None, None) is None


@pytest.mark.parametrize("value", [Opaque(), {"deep": [Opaque()]}, lambda: None, {(1, 2): 3}])
def test_what_cannot_be_encoded_is_refused_by_an_error_that_can_itself_be_journaled(value):
    codec = Codec("json")

    with pytest.raises(EncodeError) as refused:
        codec.encode(value)

    first, again = replayed(codec, refused.value)
    assert looks(first) == looks(again) == looks(refused.value)


@pytest.mark.report("limits")
@pytest.mark.parametrize("size", [98, 99])
def test_the_limit_counts_encoded_bytes_and_is_itself_allowed(size):
    codec = Codec("json", limit=100)
    value = "x" * size  # and two quotes around it

    if size + 2 <= 100:
        assert there_and_back(codec, value) == value
    else:
        with pytest.raises(PayloadTooLarge) as refused:
            codec.encode(value)
        assert (refused.value.size, refused.value.limit) == (101, 100)


def test_a_return_value_has_no_limit():
    assert there_and_back(OutcomeCodec("json"), "x" * 2_000_000) == "x" * 2_000_000


# -- who chooses the decoder -----------------------------------------------------------------------


def test_whoever_can_write_rows_cannot_make_us_unpickle():
    pickled = Codec("pickle").encode([1])

    with pytest.raises(ContentDisallowed):
        Codec("json").decode(pickled.data, pickled.content_type, pickled.content_encoding)


@pytest.mark.parametrize("before", ["json", "msgpack"])
@pytest.mark.parametrize("after", SERIALIZERS)
def test_a_changed_serializer_still_reads_what_was_journaled_before(before, after):
    old = Codec(before).encode({"a": 1})

    assert Codec(after).decode(old.data, old.content_type, old.content_encoding) == {"a": 1}


def test_bytes_that_are_no_json_are_an_error_and_no_value():
    with pytest.raises(DecodeError):
        Codec("json").decode(b"{", "application/json", "utf-8")


# -- exceptions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("serializer", SERIALIZERS)
@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        ValueError(),
        KeyError("k"),
        Plain("a", 1, None),
        Coded(7),
        Outer.Inner("nested"),
        FileNotFoundError(2, "No such file"),
        UnicodeEncodeError("ascii", "ü", 0, 1, "ordinal"),
        subprocess.CalledProcessError(3, "cmd"),
        PayloadTooLarge(5, 4),
        StepFailed("Other", "text"),
    ],
    ids=repr,
)
def test_an_exception_that_can_be_rebuilt_is_raised_as_itself_now_and_on_every_replay(serializer, error):
    first, again = replayed(Codec(serializer), error)

    assert first is error
    assert looks(again) == looks(error)


def test_attributes_that_were_set_later_come_back():
    error = Coded(7)
    error.hint = "try again"
    error.__notes__ = ["seen at night"]

    first, again = replayed(Codec("json"), error)

    assert first is error
    assert vars(again) == {"code": 7, "hint": "try again", "__notes__": ["seen at night"]}


def test_attributes_that_no_serializer_takes_are_missing_on_the_first_run_already():
    error = Coded(7)
    error.hint = Opaque()

    first, again = replayed(Codec("json"), error)

    assert first is not error
    assert looks(first) == looks(again) == (Coded, "7", (7,), {"code": 7, "hint": None})


def a_local_one():
    class Local(Exception):
        pass

    return Local("here")


@pytest.mark.parametrize(
    ("error", "name", "message"),
    [
        (Picky("500", "Get"), "Picky", "Get failed: 500"),
        (Plain(Opaque()), "Plain", None),
        (Plain((1, 2)), "Plain", "(1, 2)"),  # a list after JSON, so it would not be the same
        (a_local_one(), "a_local_one.<locals>.Local", "here"),
        (Unprintable(), "Unprintable", "its text cannot be shown (RuntimeError)"),
        (Plain("x" * 70_000), "Plain", "x" * 10_000),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_exception_that_cannot_be_rebuilt_is_raised_as_step_failed_on_the_first_run_too(
    error, name, message
):
    first, again = replayed(Codec("json", limit=150), error)

    assert type(first) is type(again) is StepFailed
    assert first.args == again.args
    assert first.type_name == name
    assert message is None or first.message == message


def test_an_error_that_tells_of_a_low_limit_is_not_itself_over_it():
    error = PayloadTooLarge(5, 1)

    assert replayed(Codec("json", limit=1), error)[0] is error


def test_a_text_without_end_is_cut():
    first, _ = replayed(Codec("json"), Picky("x" * 1_000_000, "Get"))

    assert len(first.message) == 10_000


def test_an_exception_whose_class_is_gone_is_raised_as_step_failed(monkeypatch):
    codec = Codec("json")
    payload, _ = codec.encode_exception(Plain("a"))
    monkeypatch.delattr(sys.modules[__name__], "Plain")

    again = codec.decode_exception(payload.data, payload.content_type, payload.content_encoding)

    assert (type(again), again.args) == (StepFailed, ("Plain", "a"))


@pytest.mark.parametrize(
    "described",
    [
        {"module": "os", "type": "system", "args": ["touch /tmp/pwned"]},
        {"module": "builtins", "type": "exec", "args": ["raise SystemExit"]},
        {"module": "builtins", "type": "SystemExit", "args": [0]},
        {"module": "enum", "type": "Enum", "args": ["x"]},
        {"module": "no.such.module", "type": "Boom", "args": []},
        {"module": "", "type": "", "args": []},
    ],
)
def test_nothing_but_an_exception_is_ever_called_when_one_is_rebuilt(described):
    codec = Codec("json")
    payload = codec.encode({**described, "message": "m", "attributes": {}})

    again = codec.decode_exception(payload.data, payload.content_type, payload.content_encoding)

    assert type(again) is StepFailed


def test_an_interrupt_is_no_result_that_could_be_rebuilt():
    first, again = replayed(Codec("json"), KeyboardInterrupt("stop"))

    assert type(first) is type(again) is StepFailed


# -- outcomes --------------------------------------------------------------------------------------


def test_an_outcome_that_cannot_be_rebuilt_shows_under_its_own_name_as_celery_shows_it():
    first, again = replayed(OutcomeCodec("json"), Picky("500", "Get"))

    for error in (first, again):
        assert (type(error).__name__, type(error).__module__) == ("Picky", __name__)
        assert str(error) == "Get failed: 500"


def test_an_outcome_that_can_be_rebuilt_is_itself():
    first, again = replayed(OutcomeCodec("json"), Coded(7))

    assert (type(first), looks(again)) == (Coded, looks(first))
