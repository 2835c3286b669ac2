"""Initial values of annotated leaves: those of one device, bit by bit, whatever divides them."""

import jax
import numpy as np
import optax
import pytest
from _annotated import Sharded
from _covering import sweep
from _oracle import sequential_model

ADAM, LAMB, ZERO = optax.adam(1e-2), optax.lamb(1e-2), {"zero_stage": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            Sharded(annotated="stats", data=2, optimizer=ADAM, settings=ZERO),
            Sharded(annotated="vocab", data=2, optimizer=ADAM, settings=ZERO),
            Sharded(annotated="tied", data=2, optimizer=ADAM, schedule="1f1b-v"),
            Sharded(annotated="scanned", data=2, optimizer=LAMB, settings=ZERO),
            Sharded(annotated="nnx_logical", axes=(("model", 4),), optimizer=ADAM),
            Sharded(annotated="fsdp_model", axes=(("fsdp", 2), ("model", 2)), optimizer=ADAM),
            Sharded(annotated="experts", stages=1, axes=(("expert", 2),), optimizer=ADAM),
        ],
    ),
    ids=str,
)
def test_values_are_those_of_one_device(case: Sharded) -> None:
    pipeline, wanted = case.pipeline(), sequential_model(case.model)
    state = pipeline.init()
    jax.tree.map(np.testing.assert_array_equal, pipeline.params_tree(state.params), wanted.params)
    found = pipeline.states.collections_tree(state.collections)
    jax.tree.map(np.testing.assert_array_equal, found, dict(wanted.collections))
