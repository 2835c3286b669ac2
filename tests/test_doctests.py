"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import pytest

import jaxpipe

MODULES = sorted(module.name for module in pkgutil.walk_packages(jaxpipe.__path__, "jaxpipe."))


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    names = {**vars(jaxpipe.schedules), **vars(jaxpipe)}
    assert doctest.testmod(importlib.import_module(name), extraglobs=names).failed == 0
