"""The README and the pages in `docs/` do what they show: every Python block is run, page by page."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import make_parser
from benchmarks.registry import BENCHMARKS
from jaxddp.cli.parser import Parser
from jaxddp.conftest import free_port

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]

# Every page has a namespace of its own.
RUN = """
import json, sys
for page, code in json.loads(sys.stdin.read()).items():
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
"""


def blocks(page, language):
    """Code of one language, each block at its own line numbers so that a traceback names the page's line."""
    text = page.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: m.start()].count("\n") + 1, m[2]) for m in found if m[1] == language]


def program(page):
    lines = []
    for start, code in blocks(page, "python"):
        lines += [""] * (start - len(lines)) + code.splitlines()
    return "\n".join(lines)


def test_the_tour_runs_and_prints_what_it_says():
    loss, *lines = run(PAGES[0]).splitlines()
    assert float(loss.split()[0]) < 0.1
    ((_, shown),) = blocks(PAGES[0], "")
    assert lines == shown.splitlines()


@pytest.mark.full
def test_every_python_block_runs():
    # A process that has joined a job would compute with it on the pages that follow.
    pages = [page for page in PAGES if blocks(page, "python") and page.stem != "clusters"]
    assert len(pages) > 5
    run(*pages)
    run(ROOT / "docs" / "clusters.md")


def run(*pages):
    """Runs pages in one process, as the only rank of a torchrun job; what they printed."""
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    programs = json.dumps({str(page): program(page) for page in pages})
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(
        command, input=programs, env=os.environ | torchrun, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_two_commands_stand_each_on_a_line_of_their_own():
    commands = re.findall(r"^python3 -m pip install -e .*$", PAGES[0].read_text(), re.MULTILINE)
    assert commands == [
        "python3 -m pip install -e '.[torch]' && python3 -m benchmarks",
        "python3 -m pip install -e '.[test]' && python3 -m pytest",
    ]


def commands(page):
    """Command lines with options, of code blocks and of prose: the package, and its arguments."""
    fence = r"^```\w*\n(.*?)^```$"
    text = page.read_text()
    lines = "".join(re.findall(fence, text, re.MULTILINE | re.DOTALL)).splitlines()
    prose = re.sub(fence, "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    found = (re.search(r"-m (jaxddp|torchref|benchmarks)((?: [^\s#&]+)+)", line) for line in lines)
    return [(one[1], one[2].split()) for one in found if one and " --" in one[2]]


def parser_of(package, arguments):
    if package == "benchmarks":
        return make_parser(BENCHMARKS.get(arguments[0]))
    parser = Parser()
    modules = importlib.import_module(f"{package}.__main__").COMMANDS
    subparsers = parser.add_subparsers(required=True)
    for module in modules:
        module.add_parser(subparsers)
    return parser


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_commands_have_the_options_that_are_shown(page, capsys):
    for package, arguments in commands(page):
        if arguments[0] in ("--help", "report"):
            continue
        is_named = package == "benchmarks" and not arguments[0].startswith("-")
        try:
            parser_of(package, arguments).parse_args(arguments[is_named:])
        except SystemExit:
            pytest.fail(f"{package} {' '.join(arguments)}: {capsys.readouterr().err}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_modules_of_commands_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for module in re.findall(r"python3 -m ([\w.]+)", text):
        assert importlib.util.find_spec(module), module
