"""``python -m benchmarks``: measure, and write the table."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

from benchmarks.catalogue import CATALOGUE, Measurement
from benchmarks.lab import Lab
from benchmarks.machine import machine, versions
from benchmarks.rows import Missing, Results
from benchmarks.table import as_text, lines_of, report

RESULTS = Path(__file__).with_name("results.md")


def main(arguments: list[str]) -> int:
    """Run the benchmarks; return the exit code: 1 when something of ours could not be measured."""
    if "--soak" in arguments:
        return _soak([argument for argument in arguments if argument != "--soak"])
    options = _parser().parse_args(arguments)
    if options.list:
        print("\n".join(entry.name for entry in CATALOGUE))
        return 0
    chosen = _chosen(options.only, quick=options.quick)
    where, which = machine(), versions()
    began = time.monotonic()
    results, failed = _measure(chosen, Lab(quick=options.quick))
    print(f"\n{as_text(lines_of(results))}\n\n{time.monotonic() - began:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(_as_json(results, where, which, quick=options.quick), indent=1))
    if options.only is None or options.write:
        options.results.write_text(report(results, where, which, plots=[]))
        print(f"written: {options.results}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, fewer tasks, no peers")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these only; the start of a name will do")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure under its stable name")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the report goes (%(default)s)")
    parser.add_argument("--write", action="store_true", help="write the report with --only, too")
    parser.add_argument("--list", action="store_true", help="list the names")
    return parser


def _soak(arguments: list[str]) -> int:
    if importlib.util.find_spec("benchmarks.soak") is None:
        print("there is no soak run here", file=sys.stderr)
        return 2
    soak = importlib.import_module("benchmarks.soak")
    return int(soak.main(arguments) or 0)


def _chosen(only: list[str] | None, *, quick: bool) -> list[Measurement]:
    if only is None:
        return [entry for entry in CATALOGUE if not (quick and entry.peer)]
    chosen = [entry for entry in CATALOGUE if entry.name.startswith(tuple(only))]
    if not chosen:
        raise SystemExit(f"none of these is measured: {' '.join(only)} (see --list)")
    return chosen


def _measure(chosen: list[Measurement], lab: Lab) -> tuple[Results, bool]:
    """Measure one after the other; what fails is a line of the table, and the rest goes on."""
    results, failed = Results(), False
    try:
        for entry in chosen:
            began = time.monotonic()
            try:
                for row in entry.measure(lab):
                    results.rows.append(row)
                    print(as_text(lines_of(Results([row]))[:1], ("",) * 6).splitlines()[-1], flush=True)
            except Exception as error:  # noqa: BLE001 - the table says so
                failed = failed or not entry.peer
                lab.leave()
                reason = (str(error).splitlines() or [""])[0]
                results.missing.append(Missing(entry.name, entry.name, f"{type(error).__name__}: {reason}"))
                print(f"{entry.name} failed: {error!r}", file=sys.stderr)
            print(f"  {entry.name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    finally:
        lab.close()
    return results, failed


def _as_json(
    results: Results, where: dict[str, str], which: dict[str, str], *, quick: bool
) -> dict[str, object]:
    return {
        "quick": quick,
        "machine": where,
        "versions": which,
        "rows": {row.name: row.as_json() for row in results.rows},
        "missing": {lost.name: lost.reason for lost in results.missing},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
