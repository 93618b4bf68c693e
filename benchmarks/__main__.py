"""``python -m benchmarks``: measure, and write the table."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.catalogue import CATALOGUE, Measurement
from benchmarks.lab import Lab
from benchmarks.machine import machine, versions
from benchmarks.output import Run
from benchmarks.rows import Missing, Results
from benchmarks.table import as_text, lines_of

RESULTS = Path(__file__).with_name("results.md")


def main(arguments: list[str]) -> int:
    """Run the benchmarks; return the exit code: 1 when something of ours could not be measured."""
    options = _parser().parse_args(arguments)
    if options.list:
        print("\n".join(entry.name for entry in CATALOGUE))
        return 0
    chosen = _chosen(options)
    where, began = machine(), time.monotonic()
    lab = Lab(quick=options.quick)
    results, failed = _measure(chosen, lab)
    run = Run(results, where, versions() | lab.versions, quick=options.quick)
    print(f"\n{as_text(lines_of(results))}\n\n{time.monotonic() - began:.0f} s")
    if options.json is not None:
        run.write_json(options.json)
    if options.results is not None or not (options.quick or options.only):
        report = options.results or RESULTS
        run.write_report(report)
        print(f"written: {report}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, fewer tasks, the quick ones only")
    parser.add_argument("--no-peers", action="store_true", help="install and measure no other package")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these only; the start of a name will do")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure under its stable name")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help=f"where the report goes ({RESULTS.name} beside this program, if all is measured in full)",
    )
    parser.add_argument("--list", action="store_true", help="list the names")
    return parser


def _chosen(options: argparse.Namespace) -> list[Measurement]:
    entries = [entry for entry in CATALOGUE if not (entry.peer and options.no_peers)]
    if options.only is None:
        return [entry for entry in entries if entry.quick or not options.quick]
    chosen = [entry for entry in entries if entry.name.startswith(tuple(options.only))]
    if not chosen:
        raise SystemExit(f"none of these is measured: {' '.join(options.only)} (see --list)")
    return chosen


def _measure(chosen: list[Measurement], lab: Lab) -> tuple[Results, bool]:
    """Measure one after the other; what fails is a line of the table, and the rest goes on."""
    results, failed = Results(), False
    try:
        for entry in chosen:
            began = time.monotonic()
            try:
                for row in entry.measure(lab):
                    results.add(row)
                    print(as_text(lines_of(Results().add(row)), ("",) * 6).splitlines()[-1], flush=True)
            except Exception as error:  # noqa: BLE001 - the table says so
                failed = failed or not entry.peer
                lab.leave()
                results.add(Missing.because(entry.name, entry.name, error))
                print(f"{entry.name} failed: {error!r}", file=sys.stderr)
            print(f"  {entry.name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    finally:
        lab.close()
    return results, failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
