"""Kinds of model, schedules and features whose steps TPUs' compiler takes.

The cheapest of those of the benchmark that differ most; all of them are in
`benchmarks/archive/tpu_programs.md`.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks are no part of the installed package

from benchmarks.tpu_compiles import BF16, DEVICES, FP16, Case, zero  # noqa: E402
from jaxpipe.errors import ConfigError  # noqa: E402
from jaxpipe.forecast import HARDWARE  # noqa: E402
from jaxpipe.tools.plan import compilable_devices  # noqa: E402

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs pip install jaxpipe[tpu]"
    ),
]
CASES = {
    "v5e": [
        Case("dense", "zero-bubble-v", {"skip_idle": False}, config=BF16),
        Case("complex", "1f1b", {"activation_checkpoint_interval": 1}, config=zero(1)),
        Case("recurrent", "1f1b"),
        Case("no loss", "gpipe"),
    ],
    "v5p": [
        Case("dense", "1f1b", {"gather_weights": "step"}, {"fsdp": 2}, config=BF16),
        Case("divided", "1f1b", {"skip_idle": True}, {"data": 2, "model": 2}),
        Case("norm", "interleaved", config=FP16),
        Case("tied", program="evaluate"),
    ],
}


@pytest.mark.parametrize(
    ("chip", "case"),
    [
        pytest.param(chip, case, id=f"{chip}-{case.model}-{case.schedule}")
        for chip, cases in CASES.items()
        for case in cases
    ],
)
def test_it_compiles(chip: str, case: Case) -> None:
    compiled = case.compile(compilable_devices(HARDWARE[chip], DEVICES))
    assert "collective-permute" in (compiled.as_text() or "")
    assert compiled.memory_analysis() is not None


def test_residuals_in_host_memory_are_refused_before_anything_compiles() -> None:
    case = Case("dense", pipeline={"offload_activations": True})
    with pytest.raises(ConfigError, match="offload_activations must be false on TPUs"):
        case.compile(compilable_devices(HARDWARE["v5e"], DEVICES))
