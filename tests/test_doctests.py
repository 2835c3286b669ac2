"""Every example in a docstring runs."""

import doctest
import importlib
from pathlib import Path

import pytest
from _covering import sweep

import jaxpipe

PACKAGE = Path(jaxpipe.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text())
MODULES = [
    ".".join(("jaxpipe", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in FILES
]
# Their examples compile whole models, of which the tests of the room have many.
WHOLE = [f"jaxpipe.models._{name}" for name in ("bert", "llama", "gpt2")]


@pytest.mark.parametrize(
    "name", sweep(len(MODULES) - len(WHOLE), sorted(MODULES, key=lambda name: name in WHOLE))
)
def test_docstring_examples(name: str) -> None:
    names = {**vars(jaxpipe.schedules), **vars(jaxpipe)}
    found = doctest.testmod(importlib.import_module(name), extraglobs=names)
    assert found.failed == 0
    assert found.attempted
