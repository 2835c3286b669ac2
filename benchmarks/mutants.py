"""Mutation testing.

Small faults put into the source one at a time, and whether the default tests see them.

A mutant is one change of one expression: a sign, a factor, a comparison, an index one off, a
condition turned round, the branches of a `where` swapped, a sum over devices left out. They are
drawn at random, by seed, from the files of some rooms. Each is put into a copy of the project, and
tests run there, on one core, until one fails: first those of the mutant's own file and room, then
those that compare with one device, and last, with `--whole`, all default tests.

A mutant that no test kills is either equal to the source, or a hole in the tests: write the test.

Run: python -m benchmarks.mutants [--number 200] [--seed 0] [--rooms
     core/executor,core/state,programs/autodiff,schedules] [--whole] [--out mutants.jsonl]

What `--out` holds already is not run again, so that a run may be stopped and continued.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks._table import print_head, print_row

ROOT = Path(__file__).resolve().parent.parent
ROOMS = "core/executor,core/state,programs/autodiff,schedules"
COMPARED = ("tests/core/executor", "tests/parity", "tests/sharding", "tests/core/pipeline")
"""Tests that compare with one device, whatever room the fault is in."""
SECONDS = 600
"""Longer than any of the runs takes: a mutant that waits for ever is killed, too."""
MEMORY = 10 << 30
"""More bytes than any of the runs needs: so is a mutant that fills the memory."""

LIBRARIES = (
    *("chex", "flax.linen", "flax.nnx", "hypothesis", "optax", "orbax.checkpoint"),
    *("torch", "transformers"),
)
"""What the tests import, where it is had: once for all mutants."""

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


def killer(mutant: Mutant, project: Path, cache: Path, *, whole: bool) -> str:
    """Put a mutant into a copy of the project and run tests.

    Gives the tests that killed it, or nothing.
    """
    path = project / mutant.file
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.stop :])
    try:
        changed = Path(mutant.file)
        room = Path("tests", *changed.parts[1:-1])
        own = sorted(
            str(p.relative_to(project))
            for p in (project / room).glob(f"test_*{changed.name.strip('_')}")
        )
        for chosen in (own, [str(room)], COMPARED, *([["tests"]] if whole else [])):
            if chosen and not _pass(chosen, project, cache):
                return " ".join(chosen)
        return ""
    finally:
        path.write_bytes(source)


def _pass(tests: Sequence[str], project: Path, cache: Path) -> bool:
    """Run tests in a copy of this process, which has imported what takes long."""
    run = multiprocessing.get_context("fork").Process(target=_run, args=(tests, project, cache))
    run.start()
    run.join(SECONDS)
    if run.exitcode is None:
        os.killpg(run.ident or 0, signal.SIGKILL)
        run.join()
    return run.exitcode in (0, 5)  # 5: no test was collected


def _run(tests: Sequence[str], project: Path, cache: Path) -> None:
    os.setsid()  # for what the tests start, too
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.chdir(project)
    os.environ["PYTHONPATH"] = sys.path[0] = str(project)
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(cache / "bytecode")
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    imported = "ignore::pytest.PytestAssertRewriteWarning"  # says that it was
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", imported)
    os._exit(pytest.main([*options, *tests], [_Cache(cache)]))


class _Cache:
    """Compiled programs of one mutant's tests serve the next: most mutants change none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_configure(self) -> None:
        jax.config.update("jax_traceback_in_locations_limit", 0)
        jax.config.update("jax_compilation_cache_dir", str(self.path / "programs"))


def main() -> None:
    """Draw mutants, try to kill each, and print which lived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default=ROOMS)
    parser.add_argument(
        "--whole", action="store_true", help="run all default tests on what the others let live"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("mutants.jsonl"), help="a line of JSON for each mutant"
    )
    options = parser.parse_args()
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    known = {json.dumps(entry["mutant"]): entry["killed_by"] for entry in map(json.loads, lines)}
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    print_head("file", "line", "before", "after", "killed by")
    with tempfile.TemporaryDirectory() as folder:
        project, cache = Path(folder) / "project", Path(folder) / "cache"
        shutil.copytree(
            ROOT, project, ignore=shutil.ignore_patterns(".git", "__pycache__", "*.jsonl")
        )
        if not _pass(COMPARED, project, cache):
            parser.error("tests fail without a fault: mend them first")
        for mutant in drawn(options.rooms.split(","), options.number, options.seed):
            key = json.dumps(asdict(mutant))
            if key not in known:
                known[key] = killer(mutant, project, cache, whole=options.whole)
                with options.out.open("a") as file:
                    file.write(
                        json.dumps({"mutant": asdict(mutant), "killed_by": known[key]}) + "\n"
                    )
            before, after = (" ".join(text.split())[:40] for text in (mutant.before, mutant.after))
            print_row(mutant.file, str(mutant.line), before, after, known[key] or "nobody")
    killed = sum(map(bool, known.values()))
    print(f"killed {killed} of {len(known)}, {100 * killed / max(1, len(known)):.1f} %")


if __name__ == "__main__":
    main()
