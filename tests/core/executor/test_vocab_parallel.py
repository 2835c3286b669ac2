"""Vocabulary-parallel ends by themselves, on two stages.

They are compared with the same layers whole on one device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _numbers import PRIMES, Gain, Numbers, Scale, on_stages
from _oracle import Case
from _tolerances import assert_close
from jax.sharding import PartitionSpec as P

from jaxpipe import LayerSpec, TiedLayerSpec
from jaxpipe.core.executor._batch import Microbatch
from jaxpipe.layers import VocabHead
from jaxpipe.losses import SplitLogits
from jaxpipe.programs.autodiff import differentiable

KEY, FACTOR, STAGES = jax.random.key(3), 0.5, 2


def some_like(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), tree)


def put_together(shards: Any, like: Any) -> Any:
    """Whole arrays from those of the stages.

    Shards side by side, what each stage has of the whole added up.
    """

    def one(whole: Any, *parts: Any) -> Any:
        dims = [
            d for d, (a, b) in enumerate(zip(parts[0].shape, whole.shape, strict=True)) if a != b
        ]
        return np.concatenate(parts, dims[0]) if dims else sum(parts)

    return jax.tree.map(one, like, *shards)


class Ends:
    """A pipeline of two stages with its first and last layers split, and its parameters whole."""

    def __init__(self, model: str) -> None:
        case = Case(model=model, stages=STAGES, cut="uniform")
        self.pipeline = case.pipeline()
        self.stage, self.module = self.pipeline.stage, self.pipeline.module
        self.rows = self.pipeline.init().params
        self.batch = jax.tree.map(lambda x: jnp.asarray(x[0]), case.batch())
        whole = self.pipeline.params_tree(self.rows)["layers"]
        self.trees = {
            i: whole[layer.name]
            for i, layer in enumerate(self.module.layers)
            if layer.name in whole
        }

    def run(self, layers: range, trees: Any, inputs: Any) -> Any:
        run = self.module.run_layers(layers, [trees.get(i, {}) for i in layers], train=True)
        return run(inputs, KEY, self.batch[2], [{} for _ in layers])[0]

    def on_stages(self, function: Any) -> list[Any]:
        """What a function of a stage's parameters gives on each stage."""

        def device(rows: Any) -> Any:
            return jax.tree.map(lambda x: x[None], function(jax.tree.map(lambda x: x[0], rows)))

        row = P("stage")
        mapped = jax.shard_map(
            device, mesh=self.pipeline.mesh, in_specs=row, out_specs=row, check_vma=False
        )
        found = jax.device_get(jax.jit(mapped)(self.rows))
        return [jax.tree.map(lambda x, s=s: x[s], found) for s in range(STAGES)]

    def trees_of(self, layers: range, grads: dict[str, Any], stage: int) -> dict[int, Any]:
        return {i: self.stage.params.stages[stage].view(i, grads) for i in layers}


def test_loss_of_the_last_layers() -> None:
    ends = Ends("split_last")
    stage, layers, labels = ends.stage, ends.stage.ends.last, ends.batch[1]
    output = some_like(
        jax.eval_shape(lambda: stage.activations.unpack(1, stage.activations.zeros()))
    )

    def on_a_stage(storage: Any) -> Any:
        batch = Microbatch(None, labels, (KEY, ends.batch[2]))
        is_last = jax.lax.axis_index("stage") == STAGES - 1
        # Elsewhere there is garbage, which must not get through.
        mine = jax.tree.map(lambda x: jnp.where(is_last, x, jnp.nan), output)
        packed = stage.activations.pack(1, mine)
        assert stage.vocab_loss is not None
        result = stage.vocab_loss.loss_and_gradients(
            storage, is_last, packed, batch, jnp.float32(FACTOR)
        )
        return result.sums, result.grads, stage.gradients.unpack(1, result.output_grad)

    def loss(trees: Any, output: Any) -> Any:
        sums = ends.module.loss_terms(ends.run(layers, trees, output), labels).sums()
        return sums[0] * FACTOR, sums

    found = ends.on_stages(on_a_stage)
    trees = {i: ends.trees[i] for i in layers}
    (grads, dx), sums = jax.device_get(
        jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(trees, output)
    )
    for s, (found_sums, _, found_dx) in enumerate(found):
        here = s == STAGES - 1
        assert_close(
            (found_sums, found_dx),
            jax.tree.map(lambda x, here=here: x * here, (sums, differentiable(dx))),
        )
    parts = [ends.trees_of(layers, each, s) for s, (_, each, _) in enumerate(found)]
    assert_close(put_together(parts, grads), grads)


def plus_gain(module: Gain, x: jax.Array) -> jax.Array:
    return x + module.get_variable("params", "gain")


def total_over_stages(outputs: jax.Array | SplitLogits, labels: jax.Array) -> jax.Array:
    return (
        jax.lax.psum(outputs.local.sum(), "stage")
        if isinstance(outputs, SplitLogits)
        else outputs.sum()
    )


def test_a_parameter_tied_across_the_split_has_a_gradient_from_each_side() -> None:
    """Logit s of the two is `10 * x * gain * kernel[s] + gain`, and the loss is their sum."""
    before, after = TiedLayerSpec("gain", Gain), TiedLayerSpec("gain", Gain, forward_fn=plus_gain)
    head = LayerSpec(VocabHead, STAGES, use_bias=False)
    numbers = Numbers(
        [Scale, Scale, before, head, after], [0, 1, 5], STAGES, loss_fn=total_over_stages
    )
    loss, x, kernel, gain = numbers.stage.vocab_loss, 29.0, PRIMES[3], PRIMES[4]
    assert loss is not None

    def on_a_stage(storage: Any) -> Any:
        batch = Microbatch(None, jnp.ones(1), (KEY, {}))
        is_last = jax.lax.axis_index("stage") == STAGES - 1
        result = loss.loss_and_gradients(
            storage, is_last, jnp.asarray([x]), batch, jnp.float32(FACTOR)
        )
        return result.sums, result.grads, result.output_grad

    first, last = on_stages(on_a_stage, [numbers.storage(s) for s in range(STAGES)])
    grads = [{name: g.item() for name, g in each[1].items()} for each in (first, last)]
    # Each stage computes what follows the split on its own logit; what comes before counts on the
    # last.
    assert [each["tied/gain/gain"] for each in grads] == [
        FACTOR,
        FACTOR * (1 + STAGES * 10 * x * kernel),
    ]
    assert [each["layers/3_VocabHead/kernel"] for each in grads] == [
        FACTOR * 10 * x * gain
    ] * STAGES
    assert [float(each[2][0][0]) for each in (first, last)] == [
        0,
        FACTOR * STAGES * 10 * gain * kernel,
    ]
    assert [each[0].tolist() for each in (first, last)] == [
        [0],
        [STAGES * (10 * x * gain * kernel + gain)],
    ]


# In one model the first layers hand over what virtual stages do, in the other a narrower form.
@pytest.mark.parametrize(
    "model", ["split_first", pytest.param("split_narrow", marks=pytest.mark.slow)]
)
def test_gradients_of_the_first_layers(model: str) -> None:
    ends = Ends(model)
    stage, layers, inputs = ends.stage, ends.stage.ends.first, ends.batch[0]
    trees = {i: ends.trees[i] for i in layers if i in ends.trees}
    gradient = some_like(jax.eval_shape(lambda: ends.run(layers, trees, inputs)))

    def on_a_stage(storage: Any) -> Any:
        assert stage.vocab_input is not None
        outputs = stage.vocab_input.outputs(storage, inputs, (KEY, ends.batch[2]), train=True)
        is_first = jax.lax.axis_index("stage") == 0
        packed = stage.gradients.pack(STAGES, [jnp.where(is_first, gradient, 0)])
        return outputs, stage.vocab_input.gradients(storage, inputs, (KEY, ends.batch[2]), packed)

    found = ends.on_stages(on_a_stage)
    wanted, pull = jax.vjp(lambda trees: ends.run(layers, trees, inputs), trees)
    for outputs, _ in found:
        assert_close(outputs, jax.device_get(wanted))
    parts = [ends.trees_of(range(len(trees)), each, s) for s, (_, each) in enumerate(found)]
    grads = jax.device_get(pull(gradient)[0])
    assert_close(put_together(parts, grads), grads)
