"""Damaged folders of runs: a page, or one line that names the reason, and soon."""

import copy
import json
import os
import random
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main as benchmarks
from benchmarks.report.command import main
from benchmarks.report.conftest import HOSTILE, write_full_run, write_run
from benchmarks.report.runs import read_run
from jaxddp.conftest import fuzz_seeds, soon

SOURCES = [path for path in Path(__file__).parents[1].rglob("*.py") if not path.name.endswith("_test.py")]
FIELDS = sorted({name for path in SOURCES for name in re.findall(r'"([a-z_]{3,})"', path.read_text())})
LONGEST_S = 1.0  # of processor time, for files of no more than a few MB
LONGEST_LIST = 1_000_000  # characters of JSON
VALUES = (
    None, True, -1, 0, 3, 10**400, 0.5, 1e308, -1e-308, float("nan"), float("inf"), "", "x", "3", HOSTILE, "a" * 5000,
    "WRONG: x", "FAILED: y", "not run: z", "\ud800", "\x00", [], [[]], [1, 2], ["x"], [None], [[1, "a"]], {}, {"": {}},
    {"trace": 1}, [[0, 0]] * 3, [[["all-reduce", 1]]],
)  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of every benchmark, by its name."""
    run = read_run(write_full_run(tmp_path_factory.mktemp("whole")))
    found: dict[str, list] = {}
    for row in run.rows:
        found.setdefault(row["benchmark"], []).append(row)
    for row in found["collectives"]:
        row |= {"rounds_ms": [row.get("median_ms", 1.0)] * 3, "asked_bytes": row.get("size_bytes", 8)}
    return found


def change(value, rng):
    """Changes one thing within a JSON value."""
    inner = list(value) if isinstance(value, dict) else range(len(value))
    if not inner:
        return
    key = rng.choice(inner)
    if isinstance(value[key], dict | list) and rng.random() < 0.6:
        change(value[key], rng)
    elif isinstance(value, dict) and rng.random() < 0.2:
        value[rng.choice(FIELDS)] = copy.deepcopy(rng.choice((*VALUES, value[key])))
    elif rng.random() < 0.2:
        del value[key]
    elif rng.random() < 0.2:
        value[key] = copy.deepcopy(value[rng.choice(inner)])
    elif rng.random() < 0.2:
        copies = rng.choice((0, 1, 3, 40))
        if len(json.dumps(value[key])) * copies < LONGEST_LIST:  # no copies of copies of copies
            value[key] = [copy.deepcopy(value[key])] * copies
    else:
        value[key] = copy.deepcopy(rng.choice(VALUES))


def damage_file(path, rng):
    """Changes one thing in or about a file."""
    data, deep = path.read_bytes(), rng.choice((b"[", b'{"a":')) * 100_000
    at, other = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    kind = rng.randrange(12)
    if kind < 8:
        byte = bytes([rng.randrange(256)])
        path.write_bytes(
            [data[:at], data[:at] + data[other:], data[:at] + byte + data[at + 1 :], data + deep,
             data[:at] + b"\n" + data[at:], data * 3, b"\xff\xfe" + data, data[:at] + b"\0" + data[at:]][kind]
        )  # fmt: skip
        return
    path.unlink()
    if kind == 8:
        os.mkfifo(path)
    elif kind == 9:
        path.mkdir()
    elif kind == 10:
        path.symlink_to("/dev/zero")
    else:
        path.symlink_to(path)


def check(seed, rows, folder, capsys):
    rng, run = random.Random(seed), folder / str(seed)
    chosen = rng.sample(sorted(rows), rng.choice((1, 1, 2)))
    changed = {
        name: copy.deepcopy(rng.sample(rows[name], min(len(rows[name]), rng.choice((1, 5, 40))))) for name in chosen
    }
    for _ in range(rng.choice((1, 1, 3, 10))):
        change(changed, rng)
    changed = {name: found for name, found in changed.items() if isinstance(found, list)}
    write_run(run, **changed)
    if rng.random() < 0.3 and changed:
        damage_file(run / rng.choice(sorted(changed)) / "metrics.jsonl", rng)
    run.mkdir(exist_ok=True)
    with soon(f"the page of seed {seed}", LONGEST_S):
        status = main([str(run), "--out", str(run / "page")])
    written = capsys.readouterr()
    if status == 0:
        assert (run / "page" / "report.html").read_text(), seed
    else:
        errors = [line for line in written.err.splitlines() if not line.endswith("no JSON object, skipped")]
        assert status == 2 and len(errors) == 1 and errors[0].startswith("error: "), (seed, written.err)
    return status


def test_damaged_runs(rows, tmp_path, capsys):
    statuses = {check(seed, rows, tmp_path, capsys) for seed in range(300)}
    assert statuses == {0, 2}


@pytest.mark.full
def test_a_minute_of_damaged_runs(rows, tmp_path, capsys):
    for seed in fuzz_seeds("damaged runs"):
        check(seed, rows, tmp_path, capsys)


@pytest.mark.parametrize(
    "options",
    ["", "[]", "{", "null", '{"benchmark": 3}', '{"steps": 3}', '{"benchmark": "main", "steps": "3"}', "[" * 100_000,
     '{"benchmark": "gates", "strategies": 3, "ranks": {}}', '{"benchmark": "main", "bucket_mb": ["x"]}', "\ud800",
     '{"benchmark": "nothing"}', '{"benchmark": "main", "model": []}', '{"benchmark": ["main"]}',
     '{"benchmark": "lab", "hosts": "2", "rate_mbit": []}', '{"benchmark": "main", "on": 3}'],
)  # fmt: skip
def test_damaged_options_of_a_stopped_run(tmp_path, capsys, options):
    (tmp_path / "options.json").write_text(options, errors="surrogatepass")
    assert benchmarks(["--resume", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
