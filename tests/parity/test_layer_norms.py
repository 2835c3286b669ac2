"""Norms of each layer's gradient, against those of the sequential model."""

from typing import Any

import jax
import numpy as np
import pytest
from _covering import sweep
from _models import MODELS
from _oracle import Case, make_batch, reference

ON: dict[str, Any] = {"gradient_norms_by_layer": True, "gradient_clipping": 0.1}
CASES = [
    Case(model="tied", stages=2, data=2, settings={"zero_stage": 1, **ON}),
    Case(model="linen", stages=2, schedule="interleaved", settings=ON),
    Case(model="mixed", stages=4, settings=ON),
    Case(model="tied", stages=2, data=2, settings={"zero_stage": 3, **ON}),
    Case(model="nnx", stages=1, data=2, settings=ON),
]


def norms(tree: Any) -> dict[str, float]:
    groups = {**tree.get("layers", {})}
    groups |= {f"tied/{key}": leaves for key, leaves in tree.get("tied", {}).items()}
    squares = {
        name: [np.sum(np.abs(np.asarray(x, np.float64)) ** 2) for x in jax.tree.leaves(group)]
        for name, group in groups.items()
    }
    return {name: float(np.sqrt(sum(found))) for name, found in squares.items() if found}


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep(1, CASES), ids=str)
def test_they_are_those_of_each_layer(case: Case) -> None:
    pipeline = case.pipeline()
    batch = make_batch(MODELS[case.model], case.microbatches, case.data)
    _, grads = reference(case.model, batch, case.microbatches, case.data)
    wanted = norms(grads)
    state = pipeline.init()
    metrics, *_ = pipeline.gradients(state, case.batch())
    _, after = pipeline.step(state, case.batch())
    for found in (metrics["grad_norms"], after["grad_norms"]):
        assert set(found) == set(wanted)
        actual = [float(found[name]) for name in wanted]
        np.testing.assert_allclose(actual, list(wanted.values()), rtol=1e-5, atol=1e-7)
        total = np.sqrt(np.sum(np.square(actual)))
        np.testing.assert_allclose(total, metrics["grad_norm"], rtol=1e-5)
