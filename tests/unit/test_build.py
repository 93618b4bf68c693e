"""Wheel and sdist: they build, hold what they should and nothing else, and install."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LOOK_AROUND = """\
import importlib.metadata
import celery_durable
from celery_durable.store.upgrade import newest_version
from celery_durable.testing import DurableClock, Journal
print(celery_durable.__file__, celery_durable.__version__, newest_version())
groups = importlib.metadata.distribution("celery-durable").entry_points
print(*sorted(entry.group for entry in groups))
"""


def run(*command: str, **environment: str) -> str:
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and the wheel that is made of it alone."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), ".")
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def test_the_wheel_has_the_package_whole_and_nothing_beside_it(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    files = (path for path in (ROOT / "celery_durable").rglob("*") if path.is_file())
    ours = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}

    assert inside == ours
    assert "celery_durable/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_has_tests_and_documentation(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"} <= names
    assert {"tests/conftest.py", "docs/index.md", "mkdocs.yml", "example_project/README.md"} <= names
    assert not {name for name in names if name.startswith(("site/", "build/", ".venv/"))}


def test_what_is_installed_from_the_wheel_works_by_itself(wheel: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    run(*pip, "--target", str(tmp_path), str(wheel))
    # -I: neither the working folder nor the checkout's own installation comes first.
    # A production has no pytest.
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules['pytest'] = None\n{LOOK_AROUND}"
    place, _, groups = run(sys.executable, "-I", "-c", code).partition("\n")

    assert place.startswith(str(tmp_path))
    assert groups.split() == ["celery.beat_schedulers", "celery.commands", "pytest11"]
