"""The project file and what is in the folders agree."""

from __future__ import annotations

import re
import runpy
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def module_exists(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_installed_version_is_the_one_in_the_project_file(pyproject: dict[str, Any]) -> None:
    assert metadata.version("celery-durable") == pyproject["project"]["version"]


def test_version_has_an_entry_in_the_changelog(pyproject: dict[str, Any]) -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in {"Unreleased", pyproject["project"]["version"]}


def test_every_entry_point_names_a_module_of_ours(pyproject: dict[str, Any]) -> None:
    """From the day that there is an extension to install."""
    groups = pyproject["project"]["entry-points"]
    modules = {entry.partition(":")[0] for group in groups.values() for entry in group.values()}
    missing = {name for name in modules if not module_exists(name)}
    assert not (missing and module_exists("celery_durable.extension")), missing


def test_celery_finds_our_command_and_our_scheduler_by_name() -> None:
    (command,) = metadata.entry_points(group="celery.commands", name="durable")
    (scheduler,) = metadata.entry_points(group="celery.beat_schedulers", name="durable")
    assert (command.value, scheduler.value) == (
        "celery_durable.cli:durable",
        "celery_durable.beat:DurableScheduler",
    )


def test_package_is_marked_as_typed() -> None:
    assert (ROOT / "celery_durable" / "py.typed").is_file()


def test_every_test_file_is_in_a_folder_that_the_test_command_runs(
    pyproject: dict[str, Any],
) -> None:
    folders = [ROOT / path for path in pyproject["tool"]["pytest"]["ini_options"]["testpaths"]]
    stray = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if not any(path.is_relative_to(folder) for folder in folders)
    ]
    assert stray == []


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\n" * 401, "the module has 401 lines"),
        ("def f():\n" + "    x = 1\n" * 60, "f() has 61 lines"),
        ("x = 1\n" * 300 + "def f():\n" + "    x = 1\n" * 59, None),
    ],
)
def test_size_check_names_what_is_too_long(
    source: str, complaint: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "module.py").write_text(source)
    (tmp_path / "migrations").mkdir()
    (tmp_path / "migrations" / "exempt.py").write_text("x = 1\n" * 1000)
    check = runpy.run_path(str(ROOT / "scripts" / "check_size.py"))

    exit_code = check["main"]([str(tmp_path)])

    printed = capsys.readouterr().out
    assert exit_code == (0 if complaint is None else 1)
    assert printed.count("\n") == exit_code
    assert (complaint or "") in printed
