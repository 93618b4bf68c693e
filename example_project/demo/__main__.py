"""`python -m example_project.demo`: exit code 0 when everything went as it must, else 1."""

from __future__ import annotations

import argparse
import math
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

from example_project.demo.epilogue import epilogue
from example_project.demo.pace import USUAL_DAY_SECONDS, Pace, TooSlow
from example_project.demo.screen import Printer, open_screen
from example_project.demo.text import Segment, line

if TYPE_CHECKING:
    from example_project.demo.play import Performance, Play

ROOT = Path(__file__).resolve().parents[2]
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    options = _options()
    for number in ENDING_SIGNALS:
        signal.signal(number, _interrupt)
    try:
        with _fresh_folder() as folder:
            pace = _pace(options)
            _set_environment(folder, pace.day_seconds)
            return _run(tuple(shlex.split(options.worker_options)), folder, pace)
    except TooSlow as slow:
        _once_more(slow, options.attempt + 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m example_project.demo",
        description=sys.modules["example_project.demo"].__doc__,
    )
    parser.add_argument(
        "--day-seconds",
        type=_seconds,
        help="how long a day is, exactly (default: EXAMPLE_DAY_SECONDS, or 3; longer on a slow machine)",
    )
    parser.add_argument(
        "--worker-options", default="", help="more options for celery worker, such as '-I module'"
    )
    parser.add_argument("--attempt", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


def _pace(options: argparse.Namespace) -> Pace:
    if options.day_seconds is not None:
        return Pace(options.day_seconds, is_exact=True)
    wished = os.environ.get("EXAMPLE_DAY_SECONDS") or str(USUAL_DAY_SECONDS)
    try:
        return Pace(_seconds(wished), attempt=options.attempt)
    except ValueError as error:
        sys.exit(f"EXAMPLE_DAY_SECONDS: {error}")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"no length of a day: {text}")
    return seconds


def _once_more(slow: TooSlow, attempt: int) -> NoReturn:
    """In this process, from the beginning: the application has read the length of its days."""
    Printer(sys.stdout).line(line(Segment(str(slow), "bold")))
    os.environ["EXAMPLE_DAY_SECONDS"] = str(slow.day_seconds)
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    arguments = [*sys.argv[1:], "--attempt", str(attempt)]
    os.execv(  # noqa: S606  no shell is wanted
        sys.executable, [sys.executable, "-m", "example_project.demo", *arguments]
    )


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


def _run(worker_options: tuple[str, ...], folder: Path, pace: Pace) -> int:
    # The application reads the environment when it is imported.
    from example_project.demo.play import DemoFailed, Play  # noqa: PLC0415

    out = Printer(sys.stdout)
    _tell_title(out, folder)
    screen = open_screen(out)
    play = Play(screen, worker_options, pace)
    began_at = time.monotonic()
    try:
        performance = play.perform()
        screen.finish(performance.scene)
    except TooSlow:
        raise
    except DemoFailed as failure:
        return _tell_failure(out, play, str(failure))
    except Exception as failure:  # noqa: BLE001  whatever it is: the reason, and the logs
        traceback.print_exc()
        return _tell_failure(out, play, f"{type(failure).__name__}: {failure}")
    finally:
        screen.close()
        _clean_up(play)
    return _tell_verdict(out, play, performance, time.monotonic() - began_at)


def _tell_title(out: Printer, folder: Path) -> None:
    title = "celery_durable: tasks that sleep for days, while everything is killed"
    seconds = float(os.environ["EXAMPLE_DAY_SECONDS"])
    place = f"one day takes {seconds:g} s; broker, results and durable store: files in {folder}"
    for text in (line(Segment(title, "bold")), line(place), line()):
        out.line(text)


def _clean_up(play: Play) -> None:
    # A second Ctrl-C must not leave half of them alive.
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    play.kill_all()


def _tell_verdict(out: Printer, play: Play, performance: Performance, seconds: float) -> int:
    checks = performance.checks
    out.line(line())
    for check in checks:
        mark = Segment("  ✓ ", "good") if check.passed else Segment("  ✗ ", "bad")
        out.line(line(mark, check.text))
    failed = [check.text for check in checks if not check.passed]
    if failed:
        reason = f"{len(failed)} of {len(checks)} facts are wrong; the first: {failed[0]}"
        return _tell_failure(out, play, reason)
    for text in ("", *epilogue(performance.dark), ""):
        out.line(line(text))
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
