"""Mutation testing.

Small faults put into the source one at a time, and whether the default tests see them.

A mutant is one change of one expression: a sign, a factor, a comparison, an index one off, a
condition turned round, the branches of a `where` swapped, a sum over devices left out. They are
drawn at random, by seed, from the files of some rooms. First all default tests run once, and each
tells which of the mutants' lines it reaches. Then each mutant is put into a copy of the project,
and the tests that reach it run there, the quick ones first, until one fails. Last come those of its
own file, which may reach it in another process.

A mutant that no test kills is either equal to the source, or a hole in the tests: write the test.

Run: python -m benchmarks.mutants [--number 200] [--seed 0] [--rooms
     core/executor,core/state,programs/autodiff,schedules] [--jobs 2] [--out mutants.jsonl]

It needs Python 3.12. What `--out` holds already is not run again, so that a run may be stopped and
continued.
"""

import argparse
import ast
import contextlib
import copy
import importlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import jax
import pytest

from benchmarks._table import print_head, print_row

ROOT = Path(__file__).resolve().parent.parent
ROOMS = "core/executor,core/state,programs/autodiff,schedules"
ENOUGH = 60
"""Seconds of tests that reach a mutant, in its room and again outside."""
SECONDS = 400
"""Longer than the tests of a mutant take: one that waits for ever is killed, too."""
MEMORY = 10 << 30
"""More bytes than any of the runs needs: so is a mutant that fills the memory."""

LIBRARIES = (
    *("chex", "flax.linen", "flax.nnx", "hypothesis", "optax", "orbax.checkpoint"),
    *("torch", "transformers"),
)
"""What the tests import, where it is had: once for all mutants."""

_MONITORING: Any = getattr(sys, "monitoring", None)
_TOOL = 1  # what Python calls the place of a tool for coverage
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_SUMS = {"psum", "sum_over", "mean_over"}
_SELECTS = {"where", "select"}
_TOLD = {"log", "warning", "info", "debug", "named_scope"}


@dataclass(frozen=True)
class Mutant:
    """One change of one expression.

    Attributes:
        file: The source, from the project's root.
        line: The line, counted from 1.
        start: First byte of the expression in the file.
        stop: Byte behind its last.
        before: The expression.
        after: What stands there instead.
    """

    file: str
    line: int
    start: int
    stop: int
    before: str
    after: str


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Give all mutants of a file, but for those of annotations, messages and docstrings."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _computing(ast.parse(source)):
        for changed in _changed(node):
            start = starts[node.lineno - 1] + node.col_offset
            stop = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            before, after = source[start:stop].decode(), f"({ast.unparse(changed)})"
            yield Mutant(str(path.relative_to(ROOT)), node.lineno, start, stop, before, after)


def _computing(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions that compute something, from the outermost in."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
        return
    if isinstance(node, ast.Call) and _name(node.func) in _TOLD:
        return
    if isinstance(node, ast.expr):
        yield node
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return  # of lists that have one length anyway
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _computing(child)


def _changed(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.BinOp() | ast.Compare() | ast.BoolOp():
            yield from _swapped(node)
        case ast.UnaryOp(ast.USub() | ast.Not(), operand):
            yield operand
        case ast.Constant(bool() as value, _):
            yield ast.Constant(not value)
        case ast.Constant(int() as value, _):
            yield ast.Constant(value + 1)
        case ast.IfExp(test, body, other):
            yield ast.IfExp(test, other, body)
        case ast.Call(func, [first, *_], _) if _name(func) in _SUMS:
            yield first
        case ast.Call(func, [test, one, other], []) if _name(func) in _SELECTS:
            yield ast.Call(func, [test, other, one], [])
        case _:
            return


def _swapped(node: ast.BinOp | ast.Compare | ast.BoolOp) -> Iterator[ast.expr]:
    """The expression with another operator.

    Texts, which are put together with the same ones, stay.
    """
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.right, ast.Constant)
        and not isinstance(node.right.value, int)
    ):
        return
    operators = node.ops if isinstance(node, ast.Compare) else [node.op]
    if len(operators) == 1 and type(operators[0]) in _SWAPPED:
        other: Any = _SWAPPED[type(operators[0])]()
        changed = copy.copy(node)
        if isinstance(changed, ast.Compare):
            changed.ops = [other]
        else:
            changed.op = other
        yield changed


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def drawn(rooms: Sequence[str], number: int, seed: int) -> list[Mutant]:
    """Draw mutants from all files of some rooms, each expression with equal chance."""
    files = [path for room in rooms for path in sorted((ROOT / "jaxpipe" / room).glob("*.py"))]
    found = [mutant for path in files for mutant in mutants_of(path)]
    return random.Random(seed).sample(found, min(number, len(found)))


def reached(mutants: Sequence[Mutant], project: Path, cache: Path, files: Sequence[str]) -> Path:
    """Run tests and write down, for each that passes, its seconds and the mutants it reaches."""
    out = cache / "reached.jsonl"
    _run_apart(files, project, cache, [_Reached(mutants, project, out)], limit=None)
    return out


def killer(mutant: Mutant, tests: Sequence[tuple[float, str]], project: Path, cache: Path) -> str:
    """Put a mutant into a copy of the project and run tests.

    Gives where those lie that killed it, or nothing. `tests` are those that reach the mutant.
    """
    path = project / mutant.file
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.stop :])
    try:
        changed = Path(mutant.file)
        room = Path("tests", *changed.parts[1:-1])
        own = (project / room).glob(f"test_*{changed.name.strip('_')}")
        stages = {
            str(room): _quickest(t for t in tests if Path(t[1]).is_relative_to(room)),
            "tests": _quickest(t for t in tests if not Path(t[1]).is_relative_to(room)),
            f"{room}/": [str(p.relative_to(project)) for p in own] if tests else [str(room)],
        }
        for name, chosen in stages.items():
            if chosen and _run_apart(chosen, project, cache, [], SECONDS) not in (0, 5):
                return name  # 5: no test was collected
        return ""
    finally:
        path.write_bytes(source)


def _quickest(tests: Iterable[tuple[float, str]]) -> list[str]:
    chosen, total = [], 0.0
    for seconds, name in sorted(tests):
        total += seconds
        if total < ENOUGH:
            chosen.append(name)
    return chosen


def _run_apart(
    tests: Sequence[str], project: Path, cache: Path, plugins: Sequence[Any], limit: float | None
) -> int | None:
    """Run tests in a copy of this process, which has imported what takes long."""
    run = multiprocessing.get_context("fork").Process(
        target=_run, args=(tests, project, cache, plugins, limit is not None)
    )
    run.start()
    run.join(limit)
    if run.exitcode is None:
        os.killpg(run.ident or 0, signal.SIGKILL)
        run.join()
    return run.exitcode


def _run(
    tests: Sequence[str], project: Path, cache: Path, plugins: Sequence[Any], to_first: bool
) -> None:
    os.setsid()  # for what the tests start, too
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.chdir(project)
    os.environ["PYTHONPATH"] = sys.path[0] = str(project)
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(cache / "bytecode")
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    imported = "ignore::pytest.PytestAssertRewriteWarning"  # says that it was
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", imported)
    options = (*options, *(["-x"] if to_first else []))
    os._exit(pytest.main([*options, *tests], [_Cache(cache), *plugins]))


class _Cache:
    """Compiled programs of one mutant's tests serve the next: most mutants change none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_configure(self) -> None:
        jax.config.update("jax_traceback_in_locations_limit", 0)
        jax.config.update("jax_compilation_cache_dir", str(self.path / "programs"))


class _Reached:
    """Writes down which mutants each test reaches."""

    def __init__(self, mutants: Sequence[Mutant], project: Path, out: Path) -> None:
        self.lines: dict[str, dict[int, list[int]]] = {}
        for i, mutant in enumerate(mutants):
            lines = self.lines.setdefault(str(project / mutant.file), {})
            lines.setdefault(mutant.line, []).append(i)
        self.out = out
        self.hit: set[int] = set()
        self.is_sound = True

    def pytest_configure(self) -> None:
        events = _MONITORING.events
        _MONITORING.use_tool_id(_TOOL, "mutants")
        _MONITORING.register_callback(_TOOL, events.PY_START, self._start)
        _MONITORING.register_callback(_TOOL, events.LINE, self._line)
        _MONITORING.set_events(_TOOL, events.PY_START)

    def _start(self, code: CodeType, _: int) -> Any:
        if code.co_filename in self.lines:
            _MONITORING.set_local_events(_TOOL, code, _MONITORING.events.LINE)
        return _MONITORING.DISABLE

    def _line(self, code: CodeType, line: int) -> Any:
        self.hit.update(self.lines[code.co_filename].get(line, ()))
        return _MONITORING.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.hit, self.is_sound = set(), True
        _MONITORING.restart_events()
        start = time.perf_counter()
        done = yield
        if self.is_sound and self.hit:
            entry = {"test": item.nodeid, "seconds": time.perf_counter() - start}
            with self.out.open("a") as file:
                file.write(json.dumps({**entry, "mutants": sorted(self.hit)}) + "\n")
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.is_sound = self.is_sound and not report.failed


def _work(mutants: Sequence[Mutant], known: dict[str, str], folder: Path, options: Any) -> None:
    """Run one share of the work, in files of its own, beside the others."""
    job, jobs = int(folder.name), options.jobs
    project, cache = folder / "project", folder / "cache"
    cache.mkdir(parents=True)
    shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(".git", "__pycache__", "*.jsonl"))
    files = sorted(str(p.relative_to(project)) for p in (project / "tests").rglob("test_*.py"))
    reached(mutants, project, cache, files[job::jobs])
    options.together.wait()
    entries = [
        json.loads(line)
        for path in folder.parent.glob("*/cache/reached.jsonl")
        for line in path.read_text().splitlines()
    ]
    for i, mutant in list(enumerate(mutants))[job::jobs]:
        key = json.dumps(asdict(mutant))
        if key not in known:
            tests = [
                (entry["seconds"], entry["test"]) for entry in entries if i in entry["mutants"]
            ]
            killed_by = killer(mutant, tests, project, cache)
            with options.out.open("a") as file:
                file.write(json.dumps({"mutant": asdict(mutant), "killed_by": killed_by}) + "\n")


def main() -> None:
    """Draw mutants, try to kill each, and print which lived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default=ROOMS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes side by side")
    parser.add_argument(
        "--out", type=Path, default=Path("mutants.jsonl"), help="a line of JSON for each mutant"
    )
    options = parser.parse_args()
    if _MONITORING is None:
        parser.error("it must run on Python 3.12 or newer, which tells the lines that tests reach")
    options.out = options.out.absolute()
    mutants = drawn(options.rooms.split(","), options.number, options.seed)
    known = _known(options.out)
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    options.together = fork.Barrier(options.jobs)
    with tempfile.TemporaryDirectory() as folder:
        shares = [
            fork.Process(target=_work, args=(mutants, known, Path(folder, str(job)), options))
            for job in range(options.jobs)
        ]
        for share in shares:
            share.start()
        for share in shares:
            share.join()
    known = _known(options.out)
    print_head("file", "line", "before", "after", "killed by")
    killers = [known.get(json.dumps(asdict(mutant))) for mutant in mutants]
    for mutant, by in zip(mutants, killers, strict=True):
        before, after = (" ".join(text.split())[:40] for text in (mutant.before, mutant.after))
        by = "not run" if by is None else by or "nobody"
        print_row(mutant.file, str(mutant.line), before, after, by)
    killed = sum(map(bool, killers))
    print(f"killed {killed} of {len(mutants)}, {100 * killed / max(1, len(mutants)):.1f} %")


def _known(out: Path) -> dict[str, str]:
    lines = out.read_text().splitlines() if out.exists() else []
    return {json.dumps(entry["mutant"]): entry["killed_by"] for entry in map(json.loads, lines)}


if __name__ == "__main__":
    main()
