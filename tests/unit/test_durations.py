"""What sleep and sleep_until accept, and what they refuse by name."""

from __future__ import annotations

import math
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from zoneinfo import ZoneInfo

import pytest
from celery.utils.time import make_aware
from hypothesis import given
from hypothesis import strategies as st

from celery_durable.durations import MAX_SECONDS, instant_of, seconds_of

UTC = timezone.utc
BERLIN = ZoneInfo("Europe/Berlin")
EAST = timezone(timedelta(hours=14))
WEST = timezone(timedelta(hours=-14))


@pytest.mark.parametrize(
    ("duration", "units", "expected"),
    [
        (90, {}, 90.0),
        (0.0001, {}, 0.0001),
        (timedelta(hours=2), {}, 7_200.0),
        (Fraction(1, 2), {}, 0.5),
        (Decimal("1.5"), {}, 1.5),
        (None, {"days": 3, "hours": 1}, 262_800.0),
        (None, {"weeks": 1}, 604_800.0),
        (None, {"minutes": 2, "seconds": 1, "milliseconds": 500}, 121.5),
        (None, {"hours": 1, "minutes": -30}, 1_800.0),
        (3_652 * 86_400, {}, 315_532_800.0),
        (MAX_SECONDS, {}, MAX_SECONDS),
    ],
)
def test_a_length_is_read_in_seconds(duration, units, expected):
    assert seconds_of(duration, units) == pytest.approx(expected)


@pytest.mark.parametrize("duration", [0, -5, -0.0, timedelta(days=-1), timedelta.min, -1e300])
def test_nothing_and_less_mean_at_once(duration):
    seconds = seconds_of(duration, {})

    assert seconds == 0.0
    assert math.copysign(1, seconds) == 1


@pytest.mark.parametrize("nonsense", [True, "5", b"5", [5], 5j, datetime(2030, 1, 1, tzinfo=UTC)])
def test_what_is_no_number_is_refused_by_name(nonsense):
    with pytest.raises(TypeError, match="^duration must be a number"):
        seconds_of(nonsense, {})
    with pytest.raises(TypeError, match="^days must be a number"):
        seconds_of(None, {"days": nonsense})


@pytest.mark.parametrize(
    "nonsense",
    [math.nan, math.inf, -math.inf, Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity"), 10**5000],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_finite_is_refused_by_name(nonsense):
    with pytest.raises(ValueError, match="^duration must be a finite number"):
        seconds_of(nonsense, {})
    with pytest.raises(ValueError, match="^hours must be a finite number"):
        seconds_of(None, {"hours": nonsense})


@pytest.mark.parametrize(
    ("duration", "units"),
    [
        (timedelta.max, {}),
        (MAX_SECONDS * 1.001, {}),
        (None, {"weeks": 1e308}),
        (None, {"weeks": 1e308, "days": -1e308}),
        (None, {"days": 366 * 1_000}),
    ],
)
def test_more_than_a_thousand_years_is_refused(duration, units):
    with pytest.raises(ValueError, match=r"is more than 1,000 years"):
        seconds_of(duration, units)


def test_an_unknown_unit_is_refused_by_name():
    with pytest.raises(TypeError, match=r"'day'.*weeks, days"):
        seconds_of(None, {"day": 3})


def test_none_is_no_amount_of_a_unit():
    with pytest.raises(TypeError, match="^days must be a number"):
        seconds_of(None, {"days": None})


def test_a_duration_and_units_together_are_refused():
    with pytest.raises(TypeError, match="not both: days"):
        seconds_of(5, {"days": 3})


def test_a_sleep_without_any_length_is_refused():
    with pytest.raises(TypeError, match="needs a duration"):
        seconds_of(None, {})


@pytest.mark.report("absurd-times")
@given(st.one_of(st.integers(), st.floats(), st.decimals(), st.fractions(), st.timedeltas()))
def test_every_number_gives_a_usable_length_or_a_value_error(duration):
    try:
        seconds = seconds_of(duration, {})
    except ValueError:
        return
    assert 0.0 <= seconds <= MAX_SECONDS


def instant(when: datetime, zone=BERLIN) -> datetime:
    return instant_of(when, zone, make_aware)


def test_an_aware_time_keeps_its_instant_and_comes_in_utc():
    found = instant(datetime(2030, 7, 1, 12, tzinfo=EAST))

    assert found == datetime(2030, 6, 30, 22, tzinfo=UTC)
    assert found.tzinfo is UTC


@pytest.mark.parametrize(
    ("local", "utc"),
    [
        (datetime(2030, 1, 1, 12), datetime(2030, 1, 1, 11, tzinfo=UTC)),
        (datetime(2030, 7, 1, 12), datetime(2030, 7, 1, 10, tzinfo=UTC)),
        # The hour that comes twice: the first of the two.
        (datetime(2030, 10, 27, 2, 30), datetime(2030, 10, 27, 0, 30, tzinfo=UTC)),
        (datetime(2030, 10, 27, 2, 30, fold=1), datetime(2030, 10, 27, 0, 30, tzinfo=UTC)),
    ],
)
def test_a_naive_time_is_read_in_the_zone_by_celerys_rule(local, utc):
    assert instant(local) == utc


@pytest.mark.parametrize("fold", [0, 1])
def test_a_local_time_that_does_not_exist_means_what_celery_makes_of_it(fold):
    missing = datetime(2030, 3, 31, 2, 30, fold=fold)

    assert instant(missing) == make_aware(missing, BERLIN).astimezone(UTC)


@pytest.mark.parametrize("zone", [EAST, WEST, UTC, ZoneInfo("Etc/GMT-14")])
@pytest.mark.parametrize("aware", [True, False])
def test_the_first_year_is_the_past_in_every_zone(zone, aware):
    when = datetime.min.replace(tzinfo=zone if aware else None)

    assert instant(when, zone) <= datetime(1, 1, 1, 14, tzinfo=UTC)


@pytest.mark.parametrize("aware", [True, False])
def test_the_last_year_works_where_utc_still_has_it(aware):
    when = datetime(9999, 12, 31, 23, tzinfo=EAST if aware else None)

    assert instant(when, EAST) == datetime(9999, 12, 31, 9, tzinfo=UTC)


@pytest.mark.parametrize("aware", [True, False])
def test_a_time_after_the_last_year_in_utc_is_refused_by_name(aware):
    when = datetime(9999, 12, 31, 23, tzinfo=WEST if aware else None)

    with pytest.raises(ValueError, match="^when is after the last year"):
        instant(when, WEST)


@pytest.mark.parametrize("nonsense", [date(2030, 1, 1), "2030-01-01", 1_900_000_000, None, True])
def test_what_is_no_datetime_is_refused_by_name(nonsense):
    with pytest.raises(TypeError, match="^when must be a datetime"):
        instant(nonsense)
