"""The pure parts of the benchmarks: medians, ratios, goals, marks, the table, the plots."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import plot
from benchmarks.catalogue import CATALOGUE
from benchmarks.marks import VARIABLE, Mark, Marks, mark, rate
from benchmarks.output import Run
from benchmarks.rows import Missing, Results, Row, Samples, at_least, at_most, more_than, percentile
from benchmarks.table import as_markdown, as_text, cells, lines_of, number

FASTER = Row(
    "noop_redis",
    "no-op; Redis",
    Samples("durable", "/s", (600.0, 900.0, 700.0)),
    Samples("plain", "/s", (1000.0, 1000.0, 2000.0)),
    goal=at_least(0.6),
)
LATE = Row(
    "lateness_p50_redis",
    "wake lateness, p50; Redis",
    Samples("due → body resumed", "ms", (12.0,)),
    goal=at_most(10),
    detail=(8.0, 12.0, 40.0),
)


class TestARow:
    def test_the_ratio_is_the_median_of_the_rounds_ratios(self) -> None:
        assert FASTER.ratios == (0.6, 0.9, 0.35)
        assert FASTER.figure == 0.6

    def test_without_another_side_the_figure_is_the_median(self) -> None:
        row = Row("commits", "commits", Samples("durable", "commits", (4.0, 3.0, 5.0)))
        assert row.figure == 4.0
        assert row.ratios == ()
        assert row.is_reached is None

    def test_sides_of_unequal_rounds_are_refused(self) -> None:
        row = Row("x", "x", Samples("a", "/s", (1.0, 2.0)), Samples("b", "/s", (1.0,)))
        with pytest.raises(ValueError, match="zip"):
            assert row.figure

    def test_the_spread_is_from_the_smallest_to_the_largest(self) -> None:
        assert FASTER.ours.spread == (600.0, 900.0)

    @pytest.mark.parametrize(
        ("goal", "figure", "is_reached"),
        [
            (at_least(0.6), 0.6, True),
            (at_least(0.6), 0.599, False),
            (at_most(10), 10, True),
            (at_most(10), 10.1, False),
            (more_than(1), 1, False),
            (more_than(1), 1.01, True),
        ],
    )
    def test_a_goal_is_reached_or_not(self, goal: object, figure: float, is_reached: bool) -> None:
        assert goal.is_reached(figure) is is_reached  # type: ignore[attr-defined]

    def test_json_names_ratio_and_both_sides(self) -> None:
        said = json.loads(json.dumps(FASTER.as_json()))
        assert said["ratio"] == 0.6
        assert said["ours"]["median"] == 700.0
        assert said["base"]["spread"] == [1000.0, 2000.0]
        assert said["goal"] == "≥ 0.6"
        assert said["reached"] is True


class TestPercentile:
    @pytest.mark.parametrize(("percent", "value"), [(50, 50), (99, 99), (100, 100), (1, 1), (0.1, 1)])
    def test_of_the_numbers_to_a_hundred(self, percent: float, value: float) -> None:
        assert percentile(range(100, 0, -1), percent) == value

    def test_of_one_value(self) -> None:
        assert percentile([7.0], 99) == 7.0


class TestMarks:
    def test_what_bodies_mark_is_read_in_the_order_of_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(VARIABLE, str(tmp_path))
        marks = Marks(tmp_path)
        assert marks.count("test marks") == 0
        assert marks.read("test marks") == []
        for value in (1.0, 2.0, 3.0):
            mark("test marks", value)
        assert marks.count("test marks") == 3
        found = marks.wait("test marks", 3)
        assert [one.value for one in found] == [1.0, 2.0, 3.0]
        assert found == sorted(found)

    def test_the_rate_is_from_the_first_to_the_last(self) -> None:
        assert rate([Mark(10.0, 0), Mark(10.5, 0), Mark(12.0, 0)]) == 1.0


class TestTheTable:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(0, "0"), (0.0312, "0.0312"), (0.6, "0.600"), (12.34, "12.3"), (812.4, "812"), (11868.2, "11,868")],
    )
    def test_three_digits_and_no_exponent(self, value: float, text: str) -> None:
        assert number(value) == text

    def test_a_line_says_both_sides_the_ratio_and_whether_it_is_reached(self) -> None:
        assert cells(FASTER) == (
            "no-op; Redis",
            "durable: 700 /s (600–900)",
            "plain: 1,000 /s (1,000–2,000)",
            "0.600 (0.350–0.900)",
            "≥ 0.6",
            "yes",
        )
        assert cells(LATE)[2:] == ("–", "12.0 ms", "≤ 10", "no")

    def test_what_could_not_be_measured_says_why(self) -> None:
        (line,) = lines_of(Results(missing=[Missing("peer", "a peer", "pip: no network")]))
        assert line[0] == "a peer"
        assert line[3] == "not measured: pip: no network"

    def test_columns_line_up_in_a_terminal(self) -> None:
        text = as_text(lines_of(Results([FASTER, LATE]))).splitlines()
        assert text[0].index("figure") == text[2].index("0.600") == text[3].index("12.0 ms", 60)

    def test_a_bar_in_a_cell_does_not_break_markdown(self) -> None:
        assert as_markdown([("a|b", "c")], ("x", "y")).splitlines() == [
            "| x | y |",
            "| --- | --- |",
            r"| a\|b | c |",
        ]


class TestOutput:
    def test_the_report_shows_the_table_and_the_plots(self, tmp_path: Path) -> None:
        run = Run(Results([FASTER, LATE]), {"memory": "1 GiB"}, {"celery": "5.7"})
        run.write_report(tmp_path / "results.md")
        text = (tmp_path / "results.md").read_text()
        for expected in ("| no-op; Redis |", "![lateness.svg](lateness.svg)", "| memory | 1 GiB |", "5.7"):
            assert expected in text
        for name in ("lateness.svg", "throughput.svg"):
            assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")

    def test_json_has_every_row_under_its_name(self, tmp_path: Path) -> None:
        run = Run(Results([FASTER], [Missing("dbos", "DBOS", "pip")]), {}, {}, quick=True)
        run.write_json(tmp_path / "x.json")
        said = json.loads((tmp_path / "x.json").read_text())
        assert said["rows"]["noop_redis"]["figure"] == 0.6
        assert said["missing"] == {"dbos": "pip"}
        assert said["quick"] is True

    def test_nothing_to_draw_is_no_plot(self) -> None:
        assert plot.throughput(Results([LATE])) is None
        assert plot.lateness(Results([FASTER])) is None

    def test_names_are_unique(self) -> None:
        names = [entry.name for entry in CATALOGUE]
        assert len(names) == len(set(names))
