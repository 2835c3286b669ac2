"""The blocks of the documentation run, and its configurations are read."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from _warm import run_program

from jaxpipe.config import load_config

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


OPTIONAL = {"datasets", "qwix", "torch", "torchdata"}
"""Packages of the extra `oracles`: blocks that import one are run where all are installed."""


def needs(block: str) -> set[str]:
    """The optional packages that a block imports."""
    nodes = [*ast.walk(ast.parse(block))]
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in found} & OPTIONAL


LONG = {
    *("before_and_while_it_runs", "bring_your_model", "data", "gpu_tuning"),
    *("models_and_weights", "preference_tuning", "recipes", "training"),
}
"""Pages of many compiled steps."""
PROGRAMS = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, id=page.stem, marks=pytest.mark.soak if page.stem in LONG else pytest.mark.slow
        )
        for page in PROGRAMS
    ],
)
def test_python_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    found = blocks(page, "python")
    missing = {name for block in found for name in needs(block) if find_spec(name) is None}
    run([block for block in found if not needs(block) & missing], tmp_path)
    if missing:
        pytest.skip(f"all but the blocks that need {', '.join(sorted(missing))}")


def run(program: list[str], tmp_path: Path) -> None:
    start = 'import jax\njax.config.update("jax_num_cpu_devices", 8)\n'
    file = tmp_path / "page.py"
    file.write_text(start + "\n".join(program), encoding="utf-8")
    run_program([str(file)], cwd=tmp_path)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "json")], ids=lambda page: page.stem
)
def test_json_is_a_configuration(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "json"):
        file = tmp_path / "config.json"
        file.write_text(block, encoding="utf-8")
        load_config(file)
