"""What type checkers make of the public names: a user's module, and the errors that it is to have."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SAMPLE = Path(__file__).parent / "typing_samples" / "sample.py"

#: The libraries behind the scenes take a checker most of its time, and say nothing of our names.
SETTINGS = """\
[mypy]
strict = true
python_version = 3.10
mypy_path = {root}
explicit_package_bases = true
show_error_codes = true
[mypy-sqlalchemy.*,alembic.*,psycopg.*,opentelemetry.*]
follow_imports = skip
[mypy-celery_durable.*]
follow_imports = silent
"""


def found_by_mypy(folder: Path) -> set[tuple[int, str]]:
    """The lines of the sample that have errors, and their codes."""
    settings = folder / "mypy.ini"
    settings.write_text(SETTINGS.format(root=ROOT))
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={settings}", f"--cache-dir={folder}", str(SAMPLE)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    errors = re.findall(r"sample\.py:(\d+): error: .*\[([\w-]+)\]$", ran.stdout, re.MULTILINE)
    return {(int(line), code) for line, code in errors}


def test_arguments_and_results_of_tasks_survive_their_decorator(tmp_path):
    expected = {
        (number, mark[1])
        for number, line in enumerate(SAMPLE.read_text().splitlines(), 1)
        if (mark := re.search(r"# E: ([\w-]+)$", line))
    }
    assert found_by_mypy(tmp_path) == expected
