"""The table of figures, for the terminal and for ``results.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.rows import Results, Row, Samples

LEGEND = (
    "Figures are medians of rounds in which both sides took turns; in parentheses the smallest and the "
    "largest. A ratio is that of the two sides of one round."
)
HEAD = ("measured", "ours", "compared to", "figure", "to reach", "reached")


def number(value: float) -> str:
    """A figure with three significant digits, without an exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - _magnitude(value))
    return f"{value:,.{digits}f}"


def samples(side: Samples | None) -> str:
    """``durable: 812 /s (790–830)``; the spread only where there was more than one round."""
    if side is None:
        return "–"
    text = f"{side.label}: {number(side.median)} {side.unit}"
    if len(side.values) == 1:
        return text
    low, high = side.spread
    return f"{text} ({number(low)}–{number(high)})"


def figure(row: Row) -> str:
    """The figure with its spread over the rounds."""
    values = row.ratios or row.ours.values
    unit = "" if row.base is not None else f" {row.ours.unit}"
    text = f"{number(row.figure)}{unit}"
    if len(values) > 1:
        text += f" ({number(min(values))}–{number(max(values))})"
    return text


def cells(row: Row) -> tuple[str, ...]:
    """One line of the table."""
    reached = {None: "–", True: "yes", False: "no"}[row.is_reached]
    goal = "–" if row.goal is None else str(row.goal)
    return (row.title, samples(row.ours), samples(row.base), figure(row), goal, reached)


def lines_of(results: Results) -> list[tuple[str, ...]]:
    """The whole table without its head; what could not be measured says why."""
    lines = [cells(row) for row in results.rows]
    return lines + [
        (lost.title, "–", "–", f"not measured: {lost.reason}", "–", "–") for lost in results.missing
    ]


def as_text(lines: Sequence[tuple[str, ...]], head: tuple[str, ...] = HEAD) -> str:
    """Columns for a terminal."""
    everything = [head, *lines]
    widths = [max(len(line[column]) for line in everything) for column in range(len(head))]
    rows = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in everything
    ]
    rows.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(row.rstrip() for row in rows)


def as_markdown(lines: Sequence[tuple[str, ...]], head: tuple[str, ...] = HEAD) -> str:
    """The same as a Markdown table."""
    rows = [head, tuple("---" for _ in head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def report(
    results: Results, machine: Mapping[str, str], versions: Mapping[str, str], *, plots: Sequence[str]
) -> str:
    """The text of ``results.md``."""
    notes = [f"* {row.title}: {row.note}" for row in results.rows if row.note]
    parts = [
        "# Results",
        "Written by `make bench`. What each line means is said in [performance](../docs/performance.md).",
        LEGEND,
        as_markdown(lines_of(results)),
        "\n".join(notes),
        *(f"![{name}]({name})" for name in plots),
        "## Where",
        as_markdown(list(machine.items()), ("", "")),
        "## Versions",
        as_markdown(list(versions.items()), ("", "")),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _magnitude(value: float) -> int:
    return int(f"{abs(value):e}".partition("e")[2])
