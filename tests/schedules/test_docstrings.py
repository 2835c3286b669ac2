"""The examples in the docstrings."""

import doctest
import importlib
import pkgutil

import pytest

from jaxpipe import schedules

MODULES = [f"{schedules.__name__}.{module.name}" for module in pkgutil.iter_modules(schedules.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    scope = {public: getattr(schedules, public) for public in schedules.__all__}
    result = doctest.testmod(module, extraglobs=scope)
    assert result.failed == 0
