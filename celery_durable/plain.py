"""Errors of a start, for the two that may be waiting: a person at a command line, and a program."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import click

from celery_durable.errors import ConfigurationError, StoreUnavailable


class _Misconfigured(ConfigurationError, click.ClickException):
    """A ConfigurationError that Celery's command line prints in one line."""

    def __init__(self, error: ConfigurationError) -> None:
        click.ClickException.__init__(self, "; ".join(error.problems))
        self.args = self.problems = error.problems


class _Away(StoreUnavailable, click.ClickException):
    """A StoreUnavailable that Celery's command line prints in one line."""

    def __init__(self, error: StoreUnavailable) -> None:
        click.ClickException.__init__(self, str(error))
        self.args = error.args
        self.reason, self.during = error.reason, error.during
        self._text = str(error)

    def __str__(self) -> str:
        return self._text


@contextmanager
def in_one_line() -> Iterator[None]:
    """Within a command of Celery's, what goes wrong in this block is one line on stderr and exit code 1.

    Programs get the errors as they are.
    """
    try:
        yield
    except (ConfigurationError, StoreUnavailable) as error:
        if isinstance(error, StoreUnavailable):
            error.broke_off("a start")
        if click.get_current_context(silent=True) is None:
            raise
        told = _Misconfigured(error) if isinstance(error, ConfigurationError) else _Away(error)
        raise told from error


def is_unsaid(record: logging.LogRecord) -> bool:
    """A filter for a logger of Celery's: not again, with its traceback, what a command says in one line."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (_Misconfigured, _Away))
