"""Holds README and docs against the code: examples, commands, links, tables.

Prints one line for each thing that is not true, and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

#: Packages that the examples' readers have; they are checked where they are installed.
OPTIONAL = {"django", "fastapi", "opentelemetry", "prometheus_client", "requests"}
#: The readers' own packages.
THEIRS = {"proj", "shop", "trials"}
TABLES = {"durable_executions", "durable_journal", "durable_schedule", "durable_version"}
SHELLS = {"console", "shell", "bash", "sh"}

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def prose(self) -> str:
        """The text without its code blocks, of the same length in lines."""
        return FENCE.sub(lambda found: "\n" * found[0].count("\n"), self.text)

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    def blocks(self, *languages: str) -> Iterator[str]:
        for found in FENCE.finditer(self.text):
            if found[2] in languages:
                indent = found[1]
                yield "\n".join(line.removeprefix(indent) for line in found[3].splitlines()) + "\n"

    @property
    def anchors(self) -> set[str]:
        """The headings as GitHub makes anchors of them."""
        return {_slug(heading) for heading in HEADING.findall(self.prose)}

    def rows(self, *header: str) -> list[list[str]]:
        """The rows of every table whose header starts with these cells."""
        rows: list[list[str]] = []
        inside = False
        for line in self.prose.splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not line.startswith("|"):
                inside = False
            elif inside and not set(line) <= set("|- :"):
                rows.append(cells)
            elif tuple(cells[: len(header)]) == header:
                inside = True
        return rows


def _slug(heading: str) -> str:
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def _codes(cell: str) -> list[str]:
    return CODE.findall(cell)


# Links


def check_links(page: Page) -> Iterator[str]:
    for target in LINK.findall(page.prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.path.parent / path).resolve() if path else page.path
        if not linked.exists():
            yield f"links to {target}, which is not there"
        elif anchor and linked.suffix == ".md" and anchor not in Page(linked).anchors:
            yield f"links to {target}: that page has no such heading"


def check_index(pages: list[Page]) -> Iterator[str]:
    index = Page(ROOT / "docs/index.md")
    linked = {(index.path.parent / target.partition("#")[0]).resolve() for target in LINK.findall(index.text)}
    for page in pages:
        is_ours = page.path.is_relative_to(ROOT / "docs") and page != index
        if is_ours and page.path not in linked:
            yield f"{index.name}: does not link {page.name}"


# Python examples


def check_python(page: Page) -> Iterator[str]:
    for block in page.blocks("python"):
        try:
            tree = ast.parse(block)
        except SyntaxError as error:
            yield f"a Python example does not compile: {error}"
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield from _check_import(node.module or "", alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield from _check_import(alias.name, None)


def _check_import(module: str, name: str | None) -> Iterator[str]:
    top = module.partition(".")[0]
    if not _is_installed(top):
        if top not in OPTIONAL | THEIRS:
            yield f"an example imports {module}, which there is not"
        return
    try:
        found = importlib.import_module(module)
    except ImportError:
        # An optional package may be there in part.
        if top not in OPTIONAL:
            yield f"an example imports {module}, which there is not"
        return
    if name is not None and not hasattr(found, name) and not _is_installed(f"{module}.{name}"):
        yield f"an example imports {name} from {module}, which there is not"


#: Imports the files of a project; modules of it that a page does not show are made up.
IMPORTER = """
import importlib, importlib.abc, importlib.machinery, sys
from unittest.mock import MagicMock

class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in set(sys.argv[1].split(",")):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def exec_module(self, module):
        module.__getattr__ = lambda name: MagicMock(name=name)

sys.meta_path.append(Missing())
from celery import Celery
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    for app in [value for value in vars(module).values() if isinstance(value, Celery)]:
        app.finalize()
        for task in app.tasks.values():
            if getattr(task, "is_durable", False):
                app.durable.limits(task)
"""


def check_files(page: Page) -> Iterator[str]:
    """Import what a page shows as files of a project: blocks that start with `# proj/tasks.py`."""
    files = {
        found[1]: block
        for block in page.blocks("python")
        if (found := re.match(r"# ([\w/]+\.py)\n", block)) and not _needs_more(block)
    }
    if not files:
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, block in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block)
        names = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files]
        command = [sys.executable, "-c", IMPORTER, ",".join(THEIRS), *names]
        environment = {"PYTHONPATH": f"{folder}:{ROOT}", "DJANGO_SETTINGS_MODULE": "shop.settings"}
        ran = subprocess.run(  # noqa: S603 - our own documentation
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if ran.returncode:
            yield f"the files {', '.join(files)} cannot be imported: {ran.stderr.strip().splitlines()[-1]}"


def _needs_more(block: str) -> bool:
    """Whether a block imports a package that is not installed here."""
    lines = [line for line in block.splitlines() if re.match(r"(from|import) ", line)]
    tops = {line.split()[1].partition(".")[0] for line in lines}
    return any(top in OPTIONAL and not _is_installed(top) for top in tops)


def _is_installed(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what it would be in is no package
        return False
    except ValueError:  # it has replaced itself in sys.modules
        return True


# Commands


def check_commands(page: Page) -> Iterator[str]:
    lines = [line for block in page.blocks(*SHELLS) for line in block.splitlines()]
    lines += [code for code in CODE.findall(page.prose) if re.match(r"(make|celery) ", code)]
    for line in lines:
        words = _words(line)
        if words[:1] == ["make"]:
            yield from _check_make(words[1:])
        elif words[:1] == ["celery"]:
            yield from _check_celery(words[1:], line)


def _words(line: str) -> list[str]:
    line = line.strip().removeprefix("$ ")
    if re.search(r"[…<]|\.\.\.", line):
        # An abbreviation: what comes before it is checked.
        line = re.split(r"[…<]|\.\.\.", line)[0]
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def _check_make(words: list[str]) -> Iterator[str]:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for word in words:
        if "=" not in word and word not in targets:
            yield f"names `make {word}`, which the Makefile does not have"


def _check_celery(words: list[str], line: str) -> Iterator[str]:
    from celery.bin.celery import celery  # noqa: PLC0415 - it loads every plugin

    command: Any = celery
    known = _options(command)
    for word in words:
        option = re.match(r"(--[\w-]+|-[A-Za-z])", word)
        if option:
            if option[1] not in known:
                yield f"`{line.strip()}`: {command.name} has no option {option[1]}"
        elif isinstance(command, click.Group):
            found = _subcommand(command, word)
            if found is None and command is not celery:
                yield f"`{line.strip()}`: there is no {command.name} {word}"
                return
            if found is not None:
                command, known = found, _options(found) | {"--help"}


def _subcommand(group: click.Group, word: str) -> Any:
    if word == "durable" and group.name == "celery":
        return durable_command()
    return group.commands.get(word)


def _options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}


def durable_command() -> Any:
    """The command line of celery_durable; None where there is none."""
    if importlib.util.find_spec("celery_durable.cli") is None:
        return None
    return importlib.import_module("celery_durable.cli").durable


def check_command_reference() -> Iterator[str]:
    page, group = Page(ROOT / "docs/reference/cli.md"), durable_command()
    if group is None:
        return
    shown = {_codes(row[0])[0].split()[0] for row in page.rows("command") if _codes(row[0])}
    yield from _differences(f"{page.name}: the table of commands", shown, set(group.commands))


# Settings, names, signals


def check_settings(page: Page) -> Iterator[str]:
    from celery_durable.settings import PREFIX, Settings  # noqa: PLC0415

    defaults = {PREFIX + field.name: _default(field) for field in fields(Settings)}
    rows = {_codes(row[0])[0]: row[1] for row in page.rows("setting", "default")}
    yield from _differences("the table of settings", set(rows), set(defaults))
    for name, cell in rows.items():
        default = defaults.get(name, MISSING)
        if default is not MISSING and ast.literal_eval(_codes(cell)[0]) != default:
            yield f"says that {name} is {_codes(cell)[0]} by default; it is {default!r}"


def _default(field: Any) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def check_task_options() -> Iterator[str]:
    from celery_durable import DurableTask  # noqa: PLC0415
    from celery_durable.settings import UNSET  # noqa: PLC0415

    page = Page(ROOT / "docs/reference/settings.md")
    options = {name for name, value in vars(DurableTask).items() if value is UNSET}
    shown = {_codes(row[0])[0] for row in page.rows("option")}
    yield from _differences(f"{page.name}: the table of options per task", shown, options)


def check_words(page: Page) -> Iterator[str]:
    """Every `durable_…` in the text is a setting, a table or a name in the code."""
    from celery_durable.settings import PREFIX, Settings  # noqa: PLC0415

    known = TABLES | {PREFIX + field.name for field in fields(Settings)}
    sources = "\n".join(path.read_text() for path in (ROOT / "celery_durable").rglob("*.py"))
    for word in set(re.findall(r"\b(?:durable_[a-z_]+[a-z]|CELERY_DURABLE_[A-Z_]+[A-Z])\b", page.text)):
        name = word.lower().removeprefix("celery_")
        if name not in known and not re.search(rf"\b{word}\b", sources):
            yield f"names {word}, which is neither a setting nor a name in the code"


def check_names() -> Iterator[str]:
    import celery_durable  # noqa: PLC0415

    page = Page(ROOT / "docs/reference/api.md")
    shown = set(re.findall(r"\w+", " ".join(_codes(page.text))))
    for name in celery_durable.__all__:
        if name not in shown:
            yield f"{page.name}: does not name {name}"
    errors = {
        name
        for name in celery_durable.__all__
        if inspect.isclass(found := getattr(celery_durable, name)) and issubclass(found, Exception)
    }
    listed = {_codes(row[0])[0] for row in page.rows("error")}
    yield from _differences(f"{page.name}: the table of errors", listed, errors)


def check_durable_methods(page: Page) -> Iterator[str]:
    """Every `Durable.name(argument=…)` is a method with that argument."""
    from celery_durable import Durable  # noqa: PLC0415
    from celery_durable.operations import FilterOptions  # noqa: PLC0415

    calls = re.findall(r"\b(?:Durable|app\.durable|durable)\.([a-z_]+)\(([^()]*)", page.text)
    for name, arguments in calls:
        method = getattr(Durable, name, None)
        if method is None:
            yield f"names Durable.{name}(), which there is not"
            continue
        parameters = set(inspect.signature(method).parameters)
        if "chosen" in parameters:
            parameters |= set(FilterOptions.__annotations__)
        for argument in re.findall(r"(\w+)=", arguments):
            if argument not in parameters and "options" not in parameters:
                yield f"names Durable.{name}({argument}=…), which there is not"


def check_signals() -> Iterator[str]:
    from celery_durable import signals  # noqa: PLC0415

    page = Page(ROOT / "docs/reference/signals.md")
    shown = {_codes(row[0])[0]: set(_codes(row[1])) for row in page.rows("signal", "arguments")}
    yield from _differences(f"{page.name}: the table of signals", set(shown), set(signals.__all__))
    for name, arguments in shown.items():
        sent = set(getattr(getattr(signals, name, None), "providing_args", ()) or ())
        yield from _differences(f"{page.name}: the arguments of {name}", arguments, sent)


def check_crash_points() -> Iterator[str]:
    from celery_durable.points import Point  # noqa: PLC0415

    page = Page(ROOT / "docs/reliability.md")
    names = [name for row in page.rows("point") for name in _codes(row[0])]
    shown = {name for name in names if re.fullmatch(r"[a-z]+(-[a-z]+)+", name)}
    yield from _differences(f"{page.name}: the table of crash points", shown, set(Point.names()))


def check_tests_named(page: Page) -> Iterator[str]:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in set(re.findall(r"`(test_\w+)`", page.prose)):
        if not re.search(rf"\b{name}\b", tests) and not list((ROOT / "tests").rglob(f"{name}.py")):
            yield f"names {name}, which no test is called"


def _differences(what: str, shown: set[str], real: set[str]) -> Iterator[str]:
    if missing := real - shown:
        yield f"{what} lacks {', '.join(sorted(missing))}"
    if wrong := shown - real:
        yield f"{what} has {', '.join(sorted(wrong))}, which there is not"


# All of it


PAGE_CHECKS = (
    check_links,
    check_python,
    check_files,
    check_commands,
    check_words,
    check_durable_methods,
    check_tests_named,
)


def problems() -> Iterator[str]:
    pages = [Page(path) for path in sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md"))]
    pages.append(Page(ROOT / "example_project/README.md"))
    for page in pages:
        for check in PAGE_CHECKS:
            for problem in check(page):
                yield f"{page.name}: {problem}"
    for page in (Page(ROOT / "README.md"), Page(ROOT / "docs/reference/settings.md")):
        for problem in check_settings(page):
            yield f"{page.name}: {problem}"
    yield from check_index(pages)
    for whole in (
        check_task_options,
        check_names,
        check_signals,
        check_crash_points,
        check_command_reference,
    ):
        yield from whole()


def main() -> int:
    found = list(dict.fromkeys(problems()))
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
