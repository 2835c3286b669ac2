"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import pytest
from _covering import slow_after

import jaxpipe

MODULES = sorted(module.name for module in pkgutil.walk_packages(jaxpipe.__path__, "jaxpipe."))
# Their examples compile whole models, of which the tests of the room have many.
WHOLE = [f"jaxpipe.models._{name}" for name in ("bert", "llama", "gpt2")]


@pytest.mark.parametrize(
    "name", slow_after(len(MODULES) - len(WHOLE), sorted(MODULES, key=lambda name: name in WHOLE))
)
def test_docstring_examples(name: str) -> None:
    names = {**vars(jaxpipe.schedules), **vars(jaxpipe)}
    assert doctest.testmod(importlib.import_module(name), extraglobs=names).failed == 0
