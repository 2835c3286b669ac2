"""Frozen parameters, against one device.

Stages are sharded inside, over `model` and `fsdp`.
"""

import optax
import pytest
from _annotated import Sharded
from _covering import sweep
from _frozen import check

ADAM, LAMB = optax.adam(1e-2, eps=1e-2), optax.lamb(1e-2, eps=1e-2)
ZERO, CLIP, FSDP = {"zero_stage": 1}, {"gradient_clipping": 0.1}, (("fsdp", 2),)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("case", "trainable"),
    sweep(
        0,
        [
            (
                Sharded(annotated="block", data=2, optimizer=ADAM, settings={**CLIP, **ZERO}),
                "wide|/2_",
            ),
            (
                Sharded(
                    annotated="fsdp",
                    axes=FSDP,
                    optimizer=ADAM,
                    settings={**CLIP, "gather_weights": "tick"},
                ),
                "wide",
            ),
            (
                Sharded(
                    annotated="fsdp",
                    axes=FSDP,
                    optimizer=ADAM,
                    schedule="zero-bubble",
                    settings=CLIP,
                ),
                "bias|narrow",
            ),
            (
                Sharded(annotated="fsdp", data=2, axes=FSDP, optimizer=LAMB, settings=ZERO),
                "wide|/1_",
            ),
            (
                Sharded(
                    annotated="fsdp",
                    axes=FSDP,
                    optimizer=ADAM,
                    schedule="interleaved",
                    settings={"gather_weights": "tick"},
                ),
                "wide",
            ),
            (
                Sharded(annotated="tied", data=2, optimizer=ADAM, settings={**CLIP, **ZERO}),
                "^layers",
            ),
            (
                Sharded(annotated="vocab", data=2, optimizer=ADAM, settings={**CLIP, **ZERO}),
                "layers/[1-4]_",
            ),
        ],
        unpack=True,
    ),
    ids=str,
)
def test_three_steps_equal_those_of_one_device(case: Sharded, trainable: str) -> None:
    check(case, trainable)
