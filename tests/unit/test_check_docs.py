"""The documentation check finds what is not true."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_docs
from scripts.check_docs import Page


@pytest.fixture
def page(tmp_path: Path):
    """Makes a page of a text."""

    def make(text: str) -> Page:
        path = tmp_path / "page.md"
        path.write_text(text)
        return Page(path)

    return make


def test_a_link_to_a_page_and_a_heading_that_are_there_is_fine(page):
    (made := page("# One `two`\n[a](page.md#one-two) [b](https://example.org)")).path.touch()

    assert list(check_docs.check_links(made)) == []


@pytest.mark.parametrize("target", ["other.md", "page.md#three", "#three"])
def test_a_link_to_what_is_not_there_is_found(page, target):
    assert list(check_docs.check_links(page(f"# One\n[a]({target})")))


@pytest.mark.parametrize(
    "code",
    [
        "from celery_durable import snooze",
        "from celery_durable.nowhere import sleep",
        "import nowhere_at_all",
        "def broken(:",
    ],
)
def test_an_example_that_would_not_run_is_found(page, code):
    assert list(check_docs.check_python(page(f"```python\n{code}\n```\n")))


def test_an_example_with_real_names_is_fine(page):
    code = "from celery_durable import sleep\nfrom celery.signals import task_prerun\nimport proj.tasks"

    assert list(check_docs.check_python(page(f"```python\n{code}\n```\n"))) == []


def test_a_file_of_a_project_is_imported(page):
    code = "# proj/celery.py\nfrom celery import Celery\nfrom celery_durable import Durable\n"
    code += "app = Celery('proj')\n"

    assert list(check_docs.check_files(page(f"```python\n{code}Durable(app)\n```\n"))) == []
    assert list(check_docs.check_files(page(f"```python\n{code}Durable(app, 1, 2)\n```\n")))


@pytest.mark.parametrize(
    "command",
    [
        "make dinner",
        "celery -A proj durable snooze",
        "celery -A proj durable list --colour red",
        "celery -A proj worker --no-such-option",
    ],
)
def test_a_command_that_there_is_not_is_found(page, command):
    assert list(check_docs.check_commands(page(f"```console\n{command}\n```\n")))
    assert list(check_docs.check_commands(page(f"Say `{command}`.")))


def test_commands_with_comments_and_gaps_are_fine(page):
    commands = "$ make demo    # a comment\ncelery -A proj durable list --status sleeping"
    text = f"```console\n{commands}\n```\n`celery -A proj durable …`"

    assert list(check_docs.check_commands(page(text))) == []


def test_a_table_of_settings_with_a_wrong_default_or_a_setting_too_few_is_found(page):
    problems = list(
        check_docs.check_settings(
            page("| setting | default | meaning |\n| --- | --- | --- |\n| `durable_eta` | `False` | x |\n")
        )
    )

    assert any("durable_eta is False by default; it is True" in problem for problem in problems)
    assert any("lacks" in problem and "durable_lease_ttl" in problem for problem in problems)


def test_a_setting_that_there_is_not_is_found_in_any_text(page):
    problems = list(check_docs.check_words(page("Set `durable_lease_tll` or `CELERY_DURABLE_LEASE_TTL`.")))

    assert len(problems) == 1
    assert "durable_lease_tll" in problems[0]


def test_a_method_or_an_argument_of_durable_that_there_is_not_is_found(page):
    text = (
        "`durable.postpone(by=3, task='t')` `Durable.snooze()` `app.durable.postpone(task_id, until_then=3)`"
    )

    first, second = check_docs.check_durable_methods(page(text))

    assert "snooze" in first
    assert "until_then" in second
