"""`python -m example_project.demo`: exit code 0 when everything went as it must, else 1."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from example_project.demo.screen import Printer, open_screen
from example_project.demo.text import Segment, line

if TYPE_CHECKING:
    from example_project.demo.play import Play
    from example_project.demo.verdict import Check

ROOT = Path(__file__).resolve().parents[2]
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    options = _options()
    for number in ENDING_SIGNALS:
        signal.signal(number, _interrupt)
    with _fresh_folder() as folder:
        _set_environment(folder, options.day_seconds)
        return _run(tuple(shlex.split(options.worker_options)), folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m example_project.demo",
        description=sys.modules["example_project.demo"].__doc__,
    )
    parser.add_argument(
        "--day-seconds", type=float, default=3.0, help="how long a day is (default: %(default)s)"
    )
    parser.add_argument(
        "--worker-options", default="", help="more options for celery worker, such as '-I module'"
    )
    return parser.parse_args()


@contextmanager
def _fresh_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="celery-durable-demo-") as name:
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(ROOT)


def _set_environment(folder: Path, day_seconds: float) -> None:
    """Nothing is configured but the length of a day: what is shown is the embedded default."""
    for name in [name for name in os.environ if name.startswith(("CELERY_", "EXAMPLE_"))]:
        del os.environ[name]
    os.environ["EXAMPLE_DAY_SECONDS"] = str(day_seconds)
    os.environ["EXAMPLE_DATABASE"] = str(folder / "example-shop.db")
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)


def _run(worker_options: tuple[str, ...], folder: Path) -> int:
    # The application reads the environment when it is imported.
    from example_project.demo.play import DemoFailed, Play  # noqa: PLC0415

    out = Printer(sys.stdout)
    _tell_title(out, folder)
    screen = open_screen(out)
    play = Play(screen, worker_options)
    began_at = time.monotonic()
    try:
        scene, checks = play.perform()
        screen.finish(scene)
    except DemoFailed as failure:
        return _tell_failure(out, play, str(failure))
    except Exception as failure:  # noqa: BLE001  whatever it is: the reason, and the logs
        traceback.print_exc()
        return _tell_failure(out, play, f"{type(failure).__name__}: {failure}")
    finally:
        screen.close()
        _clean_up(play)
    return _tell_verdict(out, play, checks, time.monotonic() - began_at)


def _tell_title(out: Printer, folder: Path) -> None:
    title = "celery_durable: tasks that sleep for days, while everything is killed"
    seconds = os.environ["EXAMPLE_DAY_SECONDS"]
    place = f"one day takes {seconds} s; broker, results and durable store: files in {folder}"
    for text in (line(Segment(title, "bold")), line(place), line()):
        out.line(text)


def _clean_up(play: Play) -> None:
    # A second Ctrl-C must not leave half of them alive.
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    play.kill_all()


def _tell_verdict(out: Printer, play: Play, checks: list[Check], seconds: float) -> int:
    out.line(line())
    for check in checks:
        mark = Segment("  ✓ ", "good") if check.passed else Segment("  ✗ ", "bad")
        out.line(line(mark, check.text))
    failed = [check.text for check in checks if not check.passed]
    if failed:
        reason = f"{len(failed)} of {len(checks)} facts are wrong; the first: {failed[0]}"
        return _tell_failure(out, play, reason)
    out.line(line())
    out.line(line(Segment(f"demo passed in {seconds:.1f} s", "good")))
    return 0


def _tell_failure(out: Printer, play: Play, reason: str) -> int:
    out.line(line())
    for text in play.last_log_lines():
        out.line(line(Segment(text, "dim")))
    out.line(line(Segment(f"demo failed: {reason}", "bad")))
    return 1


def _interrupt(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
