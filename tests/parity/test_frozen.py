"""Frozen parameters.

Gradients and updates of what is trained, against one device that trains the same.
"""

from typing import Any

import optax
import pytest
from _covering import sweep
from _frozen import check
from _oracle import Case

ADAM = optax.adamw(1e-2, weight_decay=0.1)
LAMB = optax.lamb(1e-2, weight_decay=0.01)
ZERO = {"zero_stage": 1}


def of_biases(path: str) -> bool:
    return path.endswith("bias")


@pytest.mark.parametrize(
    ("case", "trainable"),
    sweep(
        1,
        [
            (
                Case(
                    "linen",
                    2,
                    2,
                    schedule="zero-bubble",
                    optimizer=ADAM,
                    settings={"gradient_clipping": 0.1},
                ),
                "kernel$",
            ),
            (
                Case("tied", 2, 2, optimizer=ADAM, settings=ZERO | {"gradient_clipping": 0.1}),
                ["Block.*bias$", "^tied"],
            ),
            # Of a part of the trunk: the first stage's blocks, and the second one's first.
            (Case("linen", 4, 1, schedule="interleaved", optimizer=ADAM), r"(1|2|4)_Block|Head"),
        ],
        unpack=True,
    ),
    ids=str,
)
def test_three_steps_equal_those_of_one_device(case: Case, trainable: Any) -> None:
    check(case, trainable)


KERNELS, SOME = r"Block/.*kernel|tied|Head|table", r"/(3|5)_|Head|embedding|table"


@pytest.mark.parametrize(
    ("model", "schedule", "optimizer", "trainable"),
    sweep(
        0,
        [
            ("linen", "gpipe", LAMB, KERNELS),
            ("linen", "dual-pipe-v", ADAM, SOME),
            ("linen", "zero-bubble-v", LAMB, SOME),
            ("tied", "1f1b-v", LAMB, of_biases),
            ("tied", "zero-bubble-v", ADAM, KERNELS),
            ("tied_leaves", "1f1b", LAMB, SOME),
            ("nnx", "1f1b", ADAM, of_biases),
            ("nnx", "zero-bubble", LAMB, SOME),
            ("split", "1f1b", ADAM, of_biases),
            ("split", "zero-bubble", ADAM, SOME),
            ("split_tied", "zero-bubble", ADAM, of_biases),
            ("split_tied", "gpipe", ADAM, "^tied"),
            ("reports", "dual-pipe-v", ADAM, KERNELS),
            ("functions", "1f1b", ADAM, SOME),
            ("side", "interleaved", LAMB, "embedding"),
        ],
        unpack=True,
    ),
)
def test_everything_at_once(model: str, schedule: str, optimizer: Any, trainable: Any) -> None:
    settings = ZERO | {"gradient_clipping": 0.1}
    check(Case(model, 2, 2, schedule=schedule, optimizer=optimizer, settings=settings), trainable)


@pytest.mark.soak
@pytest.mark.parametrize("scan", sweep(1, [True, False]))
@pytest.mark.parametrize("stages", sweep(1, [2, 1, 4]))
def test_scanned_and_recomputed(scan: bool, stages: int) -> None:
    for trainable in ("kernel$", r"/(2|3)_Block|Head"):
        check(
            Case("linen", stages, 2, scan_trunk=scan, interval=1, optimizer=ADAM, settings=ZERO),
            trainable,
        )
