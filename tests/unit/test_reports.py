"""Every report of a user, and every rule, has a test that carries its name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.reports import ENTRIES, REPORTS, RULES

TESTS = Path(__file__).parents[1]


def marks_in(source: str) -> list[str]:
    """What the tests of a file stand for."""
    return [
        argument.value if isinstance(argument, ast.Constant) else ast.unparse(argument)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.report"
        for argument in decorator.args
    ]


@pytest.fixture(scope="module")
def marked() -> dict[str, list[str]]:
    """For each entry that is marked anywhere, the files in which it is."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for entry in marks_in(path.read_text()):
            found.setdefault(entry, []).append(path.name)
    return found


@pytest.mark.parametrize("entry", ENTRIES)
def test_each_has_a_test(entry: str, marked: dict[str, list[str]]) -> None:
    assert marked.get(entry), f"no test stands for: {ENTRIES[entry]}"


def test_no_mark_names_what_there_is_not(marked: dict[str, list[str]]) -> None:
    assert {entry: files for entry, files in marked.items() if entry not in ENTRIES} == {}


def test_a_mark_is_found_on_a_function_and_on_a_class() -> None:
    source = '@pytest.mark.report("a", "b")\ndef test(): ...\n@pytest.mark.report("c")\nclass Test: ...\n'
    assert marks_in(source) == ["a", "b", "c"]


def test_no_name_is_used_twice() -> None:
    assert len(ENTRIES) == len(REPORTS) + len(RULES)
