import re

import pytest
from _run_example import run_example


@pytest.mark.slow
def test_it_learns_and_lists_every_parameter_once() -> None:
    printed = run_example("linen_and_nnx.py")
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)", printed, re.MULTILINE)]
    assert losses[-1] < losses[0] / 2
    paths = re.findall(r"^  (\S+)  \[.*\]$", printed, re.MULTILINE)
    assert len(paths) == len(set(paths))
    assert {path.split("/")[0] for path in paths} == {"layers", "tied"}
    assert [path for path in paths if path.startswith("tied")] == ["tied/numbers/embedding"]
    assert {"layers/1_Attention/position", "layers/4_Feedforward/widen/kernel"} < set(paths)
