import re
from pathlib import Path

import pytest
from _covering import sweep
from _run_example import run_example

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_learns() -> None:
    losses = [
        float(loss)
        for loss in re.findall(r": loss (\S+)$", run_example("minimal.py"), re.MULTILINE)
    ]
    assert losses[-1] < losses[0] / 3


def test_the_first_block_of_the_readme_is_the_example() -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    code = (ROOT / "examples/minimal.py").read_text().split('"""\n\n', 1)[1]
    assert block[1] == code


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sweep(
        1,
        [
            "train_gpt.py",
            "custom_schedule.py",
            "linen_and_nnx.py",
            "mixture_of_experts.py",
            "tensor_parallel.py",
        ],
    ),
)
def test_help_trains_nothing(name: str) -> None:
    printed = run_example(name, "--help")
    assert "--steps" in printed
    assert "loss:" not in printed
