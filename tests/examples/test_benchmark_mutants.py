"""Mutants: which there are of a source, and that one which tests see is killed."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks are no part of the installed package

from benchmarks import mutants  # noqa: E402

SOURCE = '''"""Two + two."""
def f(x: int | None, y=1):
    if x < 2 and not y:
        raise ValueError(f"{x + 1}")
    return jnp.where(x == 3, psum(-x, "stage"), x * y) if True else f"{x}" + "!"
'''


def test_every_change_is_one_of_an_expression_that_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    path = tmp_path / "f.py"
    path.write_text(SOURCE)
    found = list(mutants.mutants_of(path))
    assert {(one.before, one.after) for one in found} == {
        ("1", "(2)"),
        ("2", "(3)"),
        ("3", "(4)"),
        ("True", "(False)"),
        ("x < 2 and not y", "(x < 2 or not y)"),
        ("x < 2", "(x <= 2)"),
        ("not y", "(y)"),
        ("x == 3", "(x != 3)"),
        ("-x", "(x)"),
        ("x * y", "(x // y)"),
        ('psum(-x, "stage")', "(-x)"),
        (
            'jnp.where(x == 3, psum(-x, "stage"), x * y)',
            "(jnp.where(x == 3, x * y, psum(-x, 'stage')))",
        ),
        (
            SOURCE.split("return ")[1].strip(),
            "(f'{x}' + '!' if True else jnp.where(x == 3, psum(-x, 'stage'), x * y))",
        ),
    }
    for one in found:
        ast.parse(SOURCE[: one.start] + one.after + SOURCE[one.stop :])


@pytest.mark.soak
@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="Python 3.12 tells the lines that tests reach"
)
def test_a_mutant_that_tests_see_is_killed_and_the_source_is_as_before(tmp_path: Path) -> None:
    for folder in ("jaxpipe/room", "tests/room", "benchmarks"):
        (tmp_path / folder).mkdir(parents=True)
    for module in ("mutants", "_table"):
        shutil.copy(f"{mutants.ROOT}/benchmarks/{module}.py", tmp_path / "benchmarks")
    source = tmp_path / "jaxpipe" / "room" / "_add.py"
    source.write_text("def add(a, b):\n    return a + b\n\n\ndef less(a, b):\n    return a < b\n")
    test = tmp_path / "tests" / "room" / "test_add.py"
    test.write_text(
        "import jaxpipe.room._add as it\n\n\ndef test_it():\n    assert it.add(1, 2) == 3\n"
    )
    command = [sys.executable, "-m", "benchmarks.mutants", "--rooms", "room", "--number", "9"]
    command += ["--out", str(tmp_path / "out.jsonl")]
    before = source.read_bytes()
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=True
    )
    assert re.search(r"\| a \+ b +\| \(a - b\) +\| tests/room +\|", done.stdout), done.stdout
    assert re.search(r"\| a < b +\| \(a <= b\) +\| nobody +\|", done.stdout), done.stdout
    assert "killed 1 of 2, 50.0 %" in done.stdout
    assert source.read_bytes() == before
