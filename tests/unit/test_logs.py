"""Log records say which durable task they are about."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Any

import pytest

import celery_durable
from celery_durable.logs import RunFields, about, add_run_fields, current_fields

PACKAGE = Path(celery_durable.__file__).parent


def record(**extra: Any) -> logging.LogRecord:
    return logging.getLogger("of.a.user").makeRecord(
        "of.a.user", logging.INFO, "file", 1, "text", (), None, extra=extra
    )


def filtered(**extra: Any) -> dict[str, Any]:
    """What the filter makes of a record."""
    made = record(**extra)
    assert RunFields().filter(made)
    return {name: made.__dict__[name] for name in ("task_id", "token", "position") if name in made.__dict__}


@pytest.fixture
def run() -> Any:
    token = current_fields.set(lambda: {**about("proj.onboard", "a", 3), "position": 7})
    yield
    current_fields.reset(token)


def test_outside_of_a_run_a_format_may_name_token_and_position() -> None:
    """The id is left to Celery's own formatter, which has a word for none."""
    assert filtered() == {"token": None, "position": None}


@pytest.mark.usefixtures("run")
def test_what_is_logged_within_a_run_is_about_it() -> None:
    assert filtered() == {"task_id": "a", "token": 3, "position": 7}


@pytest.mark.usefixtures("run")
def test_what_a_record_says_itself_stays() -> None:
    assert filtered(**about("proj.other", "b")) == {"task_id": "b", "token": None, "position": None}
    assert filtered(**about("proj.onboard", "a", 2)) == {"task_id": "a", "token": 2, "position": 7}


def test_the_handlers_that_celery_makes_get_the_filter_once() -> None:
    logger = logging.getLogger("of.no.other.test")
    logger.addHandler(logging.StreamHandler())
    add_run_fields(logger)
    add_run_fields(logger, format="as a receiver of a signal")
    (handler,) = logger.handlers
    assert [type(known) for known in handler.filters] == [RunFields]


def lines_without_fields() -> list[str]:
    """Where a task is named in a line that does not bring its fields along."""
    # In these all is said within the run, whose fields each line gets.
    within_a_run = {"execution.py", "run.py"}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger."):
                text = ast.unparse(node)
                if "%s[%s]" in text and "extra=" not in text and path.name not in within_a_run:
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    return found


def test_each_line_about_a_task_says_which_in_its_fields():
    assert lines_without_fields() == []
