"""Fails when a module or a function of the package has grown past its limit.

Usage: ``python scripts/check_size.py [FOLDER]`` (default: ``celery_durable``). Migrations are
exempt: one says a whole step of the schema, however long that is.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MODULE_LINES = 400
FUNCTION_LINES = 60
EXEMPT_FOLDER = "migrations"


def too_long(path: Path) -> Iterator[str]:
    """Yield a line of complaint for the module, and for each function in it, that is too long."""
    source = path.read_text(encoding="utf-8")
    lines = len(source.splitlines())
    if lines > MODULE_LINES:
        yield f"{path}: the module has {lines} lines (limit {MODULE_LINES})"
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES:
            yield f"{path}:{node.lineno}: {node.name}() has {lines} lines (limit {FUNCTION_LINES})"


def modules(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py")):
        if EXEMPT_FOLDER not in path.relative_to(folder).parts:
            yield path


def main(arguments: list[str]) -> int:
    """Check the folder; return the exit code: 0 when all is within the limits, else 1."""
    folder = Path(arguments[0]) if arguments else Path("celery_durable")
    if not folder.is_dir():
        print(f"no such folder: {folder}")
        return 1
    complaints = [line for path in modules(folder) for line in too_long(path)]
    for line in complaints:
        print(line)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
