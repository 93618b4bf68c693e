"""Where results go: the report with its plots, and the JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks import plot
from benchmarks.rows import Results
from benchmarks.table import report


@dataclass(frozen=True)
class Run:
    """One run of the benchmarks: what it measured, where, with what."""

    results: Results
    machine: dict[str, str]
    versions: dict[str, str]
    quick: bool = False

    def write_json(self, path: Path) -> None:
        """Every figure under its stable name."""
        content = {
            "quick": self.quick,
            "machine": self.machine,
            "versions": self.versions,
            "rows": {row.name: row.as_json() for row in self.results.rows},
            "missing": {gap.name: gap.reason for gap in self.results.missing},
        }
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def write_report(self, path: Path) -> None:
        """The table, and beside it the plots that it shows."""
        drawn = {
            "throughput.svg": plot.throughput(self.results),
            "lateness.svg": plot.lateness(self.results),
        }
        plots = {name: image for name, image in drawn.items() if image is not None}
        for name, image in plots.items():
            path.with_name(name).write_text(image)
        path.write_text(report(self.results, self.machine, self.versions, plots=list(plots)))
