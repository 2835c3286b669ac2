"""The epilogue and the loss by themselves: products of primes say which factor is wrong."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _numbers import PRIMES, Gain, Noise, Numbers, Reporter, Scale, Sided, times

from jaxpipe.core.executor._batch import Microbatch
from jaxpipe.core.executor._results import LossResult

KEY = jax.random.key(3)
ARRIVED, LABEL, MAIN, REPORTED, KEPT = 29.0, 31.0, 0.5, 0.25, 4.0
SIDE = 37.0


def one(value: float) -> jax.Array:
    return jnp.asarray([value])


def run(numbers: Numbers, held: Any = None, side: Any = None) -> LossResult:
    stage = numbers.stage
    batch = Microbatch(None, one(LABEL), (KEY, side or {}))
    held = stage.collections.layout.zeros() if held is None else held
    cotangents = jnp.float32(MAIN), jnp.float32(REPORTED)
    return stage.epilogue.loss_and_gradients(
        numbers.storage(1), held, one(ARRIVED), batch, cotangents
    )


def kept(numbers: Numbers) -> Any:
    """The last stage's collections, in which every number is `KEPT`."""
    return jax.tree.map(lambda x: jnp.full_like(x, KEPT), numbers.stage.collections.layout.zeros())


@pytest.fixture(scope="module")
def reporting() -> Numbers:
    return Numbers([Scale, Scale, Gain, Reporter], [0, 1, 4], 2)


def measured_times(outputs: jax.Array, labels: jax.Array) -> Any:
    return times(outputs, labels), 3.0, {"size": outputs.sum()}


@pytest.mark.parametrize(("loss_fn", "metrics"), [(times, []), (measured_times, [3.0])])
def test_sums_are_as_they_are_and_gradients_times_the_cotangent(
    loss_fn: Any, metrics: list[float]
) -> None:
    """Metrics have no gradient."""
    numbers = Numbers([Scale, Scale, Gain, Gain], [0, 1, 4], 2, loss_fn=loss_fn)
    assert tuple(numbers.stage.cuts[-1].epilogue) == (2, 3)
    result, (a, b) = run(numbers), PRIMES[2:4]
    assert result.sums.tolist() == [ARRIVED * factor * a * b * 100 for factor in (LABEL, *metrics)]
    assert numbers.grads(1, result.grads) == {
        2: ARRIVED * LABEL * b * 100 * MAIN,
        3: ARRIVED * LABEL * a * 100 * MAIN,
    }
    assert [float(leaf[0]) for leaf in result.output_grad] == [LABEL * a * b * 100 * MAIN]


def test_reported_losses_have_a_cotangent_of_their_own(reporting: Numbers) -> None:
    a, b = PRIMES[2] * 10, PRIMES[3]
    result, each = run(reporting), LABEL * MAIN + REPORTED
    assert result.sums.tolist() == [ARRIVED * LABEL * a * b]
    assert reporting.grads(1, result.grads) == {2: ARRIVED * b * 10 * each, 3: ARRIVED * a * each}
    assert [float(leaf[0]) for leaf in result.output_grad] == [a * b * each]
    # Values as they are: neither is scaled.
    assert result.reported.tolist() == [ARRIVED * a * b, 100 * ARRIVED * a]
    assert [name for _, name in reporting.stage.epilogue.aux.names] == [
        "3_Reporter/size",
        "3_Reporter/top",
    ]


def test_collections_go_on_from_those_before(reporting: Numbers) -> None:
    result = run(reporting, kept(reporting))
    view = reporting.stage.collections.views(1, [3], result.collections)
    assert jax.tree.leaves(view) == [KEPT + ARRIVED * PRIMES[2] * 10]


def test_outputs_are_those_outside_of_training(reporting: Numbers) -> None:
    epilogue, held = reporting.stage.epilogue, kept(reporting)
    output = epilogue.outputs(reporting.storage(1), held, one(ARRIVED), (None, {}))
    assert output.tolist() == [ARRIVED * PRIMES[2] * PRIMES[3]]


def test_what_is_frozen_has_no_gradient() -> None:
    numbers = Numbers(
        [Scale, Scale, Gain, Gain], [0, 1, 4], 2, trainable=lambda name: "2_Gain" not in name
    )
    result, (a, b) = run(numbers), PRIMES[2:4]
    assert numbers.grads(1, result.grads) == {3: ARRIVED * LABEL * a * 100 * MAIN}
    assert [float(leaf[0]) for leaf in result.output_grad] == [LABEL * a * b * 100 * MAIN]


def test_keys_and_side_inputs_are_those_of_the_layer_in_the_model() -> None:
    numbers = Numbers([Scale, Scale, Sided, Noise], [0, 1, 4], 2, side={"factor": jnp.ones(1)})
    views = [{"number": jnp.float32(PRIMES[2])}, {"noise": jnp.float32(PRIMES[3])}]
    layers = numbers.pipeline.module.run_layers(range(2, 4), views, train=True)
    side = {"factor": one(SIDE)}
    wanted = layers(one(ARRIVED), KEY, side, [{}, {}])[0] * LABEL
    assert run(numbers, side=side).sums.tolist() == wanted.tolist()
