"""The plugin in projects of their own: one that uses it as the documentation says, one that does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "howto" / "testing.md"


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest with no plugin but ours, on a project that is not this one."""
    command = [sys.executable, "-m", "pytest", "-p", "celery_durable.testing", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_pytest_finds_it_by_itself():
    (plugin,) = metadata.entry_points(group="pytest11", name="celery_durable")
    assert plugin.value == "celery_durable.testing"


def write_documented_project(folder: Path) -> None:
    for name, block in re.findall(r"```python\n# ([\w/]+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(block)


def test_the_project_of_the_documentation(tmp_path):
    """Its app is configured for servers that are not there, and the environment names another one."""
    write_documented_project(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    environment = {"CELERY_DURABLE_DATABASE_URL": "postgresql+psycopg://nobody@nowhere.invalid/none"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        ran = run_pytest(tmp_path, "-q")

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout


def test_what_a_newcomer_gets_wrong_is_a_failure_of_the_test_in_one_sentence(tmp_path):
    write_documented_project(tmp_path)
    (tmp_path / "conftest.py").unlink()
    (tmp_path / "test_crashes.py").write_text(
        "def test_not_reached(durable_clock):\n"
        "    durable_clock.crash_at('retry-stored')\n\n"
        "def test_wrong_by_itself(durable_clock):\n"
        "    durable_clock.crash_at('retry-stored')\n"
        "    assert 1 == 2\n\n"
        "def test_the_next_one(durable_clock):\n"
        "    pass\n"
    )
    ran = run_pytest(tmp_path, "-q", "-rfE", "-W", "error")

    *_, summary = ran.stdout.strip().splitlines()
    assert re.match("5 failed, 1 passed in", summary), ran.stdout + ran.stderr
    refused = r"ConfigurationError: task proj\.tasks\.onboard belongs to the app 'proj'"
    assert len(re.findall(rf"^E  .*{refused}", ran.stdout, re.MULTILINE)) == 3
    assert (
        len(re.findall(r"^no run has come to the crash point retry-stored$", ran.stdout, re.MULTILINE)) == 1
    )
    assert "FAILED test_crashes.py::test_wrong_by_itself - assert 1 == 2" in ran.stdout


def test_a_project_that_does_not_use_it_imports_nothing_of_celery(tmp_path):
    (tmp_path / "test_plain.py").write_text(
        "import sys\n\n"
        "def test_plain():\n"
        "    heavy = {'celery', 'kombu', 'sqlalchemy', 'alembic'} & set(sys.modules)\n"
        "    ours = sorted(name for name in sys.modules if name.startswith('celery_durable'))\n"
        "    assert not heavy\n"
        "    assert ours == ['celery_durable', 'celery_durable.testing', 'celery_durable.testing.plugin']\n"
    )
    ran = run_pytest(tmp_path, "-q", "-W", "error")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_public_name_is_imported_when_it_is_used():
    import celery_durable
    from celery_durable import testing

    for module in (celery_durable, testing):
        for name in module.__all__:
            assert getattr(module, name) is not None
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = module.nonsense
    assert set(celery_durable.__all__) <= set(dir(celery_durable))
