from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.launch._yaml import to_yaml

yaml = pytest.importorskip("yaml")

SCALARS = st.text() | st.integers(-(10**9), 10**9) | st.booleans() | st.sampled_from(["null", "No", "~", "1e3", "- a"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=12
)


@given(VALUES)
def test_what_is_written_is_read(value: Any) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


def test_block_style() -> None:
    value = {"a": [{"b": 1, "c": ["x", {}]}, []], "d-e/f": "on"}
    assert to_yaml(value) == 'a:\n  - b: 1\n    c:\n      - x\n      - {}\n  - []\nd-e/f: "on"\n'
