"""The demo as a user runs it: what it prints, what it returns, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SLOW = "this machine is slow: a day takes"

# Not `step`, but the function alone: what a replay must not run again, it runs again.
UNJOURNALED = """
from example_project import tasks
tasks.step = lambda function, *args, **kwargs: function(*args, **kwargs)
"""
# One sleep too few: the three days are over at once.
SLEEPLESS = """
from example_project import tasks
tasks.sleep = lambda *args, **kwargs: None
"""
# A task that fails before it sleeps.
BROKEN = """
from example_project import shop
shop.send_welcome = None
"""


def start_demo(*options: str, module_folder: Path | None = None) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    if module_folder is not None:
        env["PYTHONPATH"] = str(module_folder)
    return subprocess.Popen(
        [sys.executable, "-m", "example_project.demo", *options],
        cwd=ROOT,
        env=env,
        encoding="utf-8",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run_demo(*options: str, module_folder: Path | None = None) -> tuple[int, str]:
    with start_demo(*options, module_folder=module_folder) as demo:
        output, _ = demo.communicate(timeout=400)
    return demo.returncode, output


def sabotaged_demo(folder: Path, sabotage: str) -> tuple[int, str]:
    (folder / "sabotage.py").write_text(sabotage)
    options = ("--day-seconds", "1", "--worker-options", "-I sabotage")
    return run_demo(*options, module_folder=folder)


def folders_of(output: str) -> list[str]:
    """One, or one for each time that a slow machine made it begin again."""
    folders = re.findall(r"files in (\S+)", output)
    assert len(folders) == 1 + output.count(SLOW)
    return folders


def processes_in(folder: str) -> list[int]:
    """The processes that were started with their shop in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            database = process.environ().get("EXAMPLE_DATABASE", "")
        except psutil.Error:
            continue
        if database.startswith(folder):
            found.append(process.pid)
    return found


def assert_nothing_is_left(output: str) -> None:
    for folder in folders_of(output):
        assert processes_in(folder) == []
        assert not Path(folder).exists()


@pytest.mark.timeout(450)
def test_the_demo_passes_and_prints_what_it_measured() -> None:
    began_at = time.monotonic()
    code, output = run_demo()
    seconds = time.monotonic() - began_at

    assert code == 0, output
    assert seconds < 60 or SLOW in output
    assert "✗ " not in output.partition("✓ states")[2]
    assert re.search(r"kill -9: worker \d+ \d+ \d+, beat \d+; no process of theirs is left", output)
    for fact in (
        r"✓ states of the results while every process was dead: 3 SLEEPING",
        r"✓ kept meanwhile: 3 sleeping rows, 0 messages of these tasks in the broker",
        r"✓ 0 runs and steps in the \d+\.\d s without a process",
        r"✓ onboard Ada: what its steps did: 1 × welcome, 1 × paid\?",
        r"✓ onboard Ada: woke \d+ ms after (it was due|the restart)",
        r"✓ onboard Ada: SUCCESS, 'customer', after 2 runs of the body",
        r"✓ onboard Grace: what its steps did: 1 × welcome, 1 × paid\?, 1 × last call",
        r"✓ onboard Grace: SUCCESS, 'lapsed', after 3 runs of the body",
        r"✓ collect invoice: what its steps did: 1 × reminder #1, 1 × reminder #2 not needed",
        r"✓ collect invoice: SUCCESS, 'paid after 1 reminder\(s\)', after 3 runs of the body",
        r"✓ beat schedule: [1-9]\d* digest\(s\) and [1-9]\d* export\(s\) after the restart",
        r"✓ beat schedule: [1-9]\d* exported page\(s\), 0 written twice",
        r"Killed without a warning: worker and beat, [4-9] processes, while 3 tasks slept",
        r"Kept meanwhile: 3 rows in a database, no messages in the broker\.",
        r"demo passed in \d+\.\d s",
    ):
        assert re.search(fact, output), (fact, output)
    assert_nothing_is_left(output)


@pytest.mark.timeout(450)
def test_the_demo_fails_when_steps_are_not_journaled(tmp_path: Path) -> None:
    code, output = sabotaged_demo(tmp_path, UNJOURNALED)

    assert code == 1, output
    assert "✗ onboard Ada: what its steps did: 2 × welcome, 1 × paid?" in output
    assert "facts are wrong; the first: onboard Ada: what its steps did" in output
    assert "last lines of the log of worker:" in output
    assert_nothing_is_left(output)


@pytest.mark.timeout(450)
def test_the_demo_fails_when_a_task_does_not_sleep(tmp_path: Path) -> None:
    code, output = sabotaged_demo(tmp_path, SLEEPLESS)

    assert code == 1, output
    assert "✗ onboard Ada: woke " in output
    assert "✗ onboard Ada: SUCCESS, 'lapsed'" in output
    assert_nothing_is_left(output)


def test_the_demo_says_why_a_task_failed(tmp_path: Path) -> None:
    code, output = sabotaged_demo(tmp_path, BROKEN)

    assert code == 1, output
    assert re.search(r"demo failed: onboard \w+ did not sleep: FAILURE, TypeError", output), output
    assert_nothing_is_left(output)


def test_the_demo_says_why_a_worker_did_not_start() -> None:
    code, output = run_demo("--worker-options", "-I no_such_module")

    assert code == 1, output
    assert "No module named 'no_such_module'" in output
    assert "demo failed: worker ended by itself, exit code" in output
    assert_nothing_is_left(output)


@pytest.mark.timeout(450)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_an_interrupted_demo_leaves_nothing(number: signal.Signals) -> None:
    seen = ""
    with start_demo() as demo:
        assert demo.stdout is not None
        for text in demo.stdout:
            seen += text
            if "sent:" in text:
                break
        assert len(processes_in(folders_of(seen)[-1])) >= 4
        demo.send_signal(number)
        output, _ = demo.communicate(timeout=20)

    assert demo.returncode == 128 + number, seen + output
    assert_nothing_is_left(seen)
