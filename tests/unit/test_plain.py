"""Who is told in which way that a start has failed."""

from __future__ import annotations

import click
import pytest

from celery_durable.errors import ConfigurationError, DurableError, StoreUnavailable
from celery_durable.plain import in_one_line

ERRORS = [ConfigurationError("one is wrong", "two is wrong"), StoreUnavailable("refused")]


def start(error: DurableError) -> None:
    with in_one_line():
        raise error


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
class TestAFailedStart:
    def test_a_program_gets_the_error_as_it_is(self, error: DurableError) -> None:
        with pytest.raises(DurableError) as caught:
            start(error)
        assert caught.value is error

    def test_within_a_command_it_is_one_that_click_prints_and_still_the_same_to_a_program(
        self, error: DurableError
    ) -> None:
        with click.Context(click.Command("worker")), pytest.raises(type(error)) as caught:
            start(error)
        assert isinstance(caught.value, click.ClickException)
        assert "\n" not in caught.value.format_message()
        assert "Nothing is lost" not in caught.value.format_message()
        assert (caught.value.args, str(caught.value)) == (error.args, str(error))


def test_other_errors_pass() -> None:
    with click.Context(click.Command("worker")), pytest.raises(ZeroDivisionError), in_one_line():
        raise ZeroDivisionError
