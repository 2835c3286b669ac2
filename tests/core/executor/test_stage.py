"""A virtual stage by itself, without mesh, schedule or loop.

It computes what its layers compute in a row.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _covering import sweep
from _oracle import Case
from _tolerances import assert_close

from jaxpipe.core.executor._batch import Microbatch
from jaxpipe.core.executor._buffers import zeros_of
from jaxpipe.core.executor._stage import Stage, Weights
from jaxpipe.core.executor._virtual_stage import VirtualStage
from jaxpipe.core.state import Storage
from jaxpipe.layers import PipelineModule
from jaxpipe.programs.autodiff import differentiable, replace_differentiable

KEY, FACTOR = jax.random.key(3), jnp.float32(0.5)

CASES = [
    Case(model="dropout", stages=2, schedule="interleaved", cut="trunk"),
    Case(model="shapes", stages=2, schedule="zero-bubble"),
    Case(model="linen", stages=2, schedule="zero-bubble-v", cut="trunk", skip_idle=False),
    Case(model="linen", stages=4, cut="front", schedule="zero-bubble-h1"),
    Case(model="linen", stages=2, scan_trunk=True, cut="trunk", schedule="zero-bubble"),
]


def some_like(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), tree)


class Alone:
    """The virtual stages of a pipeline on one device, beside the layers that they hold."""

    def __init__(self, case: Case) -> None:
        pipeline = case.pipeline()
        self.module: PipelineModule = pipeline.module
        self.stage: Stage = pipeline.stage
        self.batch = jax.tree.map(lambda x: jnp.asarray(x[0]), case.batch())
        self.rows = jax.tree.map(jnp.asarray, jax.device_get(pipeline.init().params))

    def storage(self, stage: int) -> Storage:
        return jax.tree.map(lambda x: x[stage], self.rows)

    def leaves(self, stage: int, layers: range) -> dict[str, jax.Array]:
        """Parameters of some layers, by name."""
        names = self.stage.params.stages[stage].names_of(layers)
        return {
            name: self.stage.params.layout.get(stage, name, self.storage(stage)) for name in names
        }

    def run(self, stage: int, layers: range, leaves: Any, inputs: Any) -> Any:
        """The layers in a row."""
        views = [self.stage.params.stages[stage].view(i, leaves) for i in layers]
        run = self.module.run_layers(layers, views, train=True)
        return run(inputs, KEY, self.batch[2], [{} for _ in layers])[0]

    def grads(self, v: int, names: Any, trunk: Any, off_trunk: Any) -> dict[str, jax.Array]:
        """Gradients of one action by name, zero where it gives none."""
        params, pieces = self.stage.params, self.stage.trunk
        stage, chunk = self.stage.placement.locations[v]
        nothing = zeros_of(pieces.sums)
        leaves, treedef = jax.tree.flatten(nothing)
        pairs = zip(treedef.flatten_up_to(trunk), leaves, strict=True)
        trees = [nothing] * len(self.stage.placement.virtual[stage])
        trees[chunk] = treedef.unflatten([zero if g is None else g for g, zero in pairs])
        off_trunk = self.stage.zero_off_trunk_grads() if off_trunk is None else off_trunk
        found = Storage(off_trunk.packed, {**off_trunk.stacked, **pieces.named(trees)})
        return {name: params.grad_layout.get(stage, name, found) for name in names}

    def both(self, v: int, inputs: Any) -> tuple[Any, Any]:
        """What a virtual stage gives, and its layers.

        The output, and the gradients of parameters and input.
        """
        stage, (place, chunk), cut = (
            self.stage,
            self.stage.placement.locations[v],
            self.stage.cuts[v],
        )
        at = VirtualStage(
            jnp.int32(place), jnp.int32(chunk) if stage.trunk._join else chunk, stage.placement
        )
        layers, storage = range(cut.prologue.start, cut.trunk.stop), self.storage(place)
        leaves = self.leaves(place, layers)

        def values(leaves: Any, inexact: Any) -> Any:
            return differentiable(
                self.run(place, layers, leaves, replace_differentiable(inputs, inexact))
            )

        output = self.run(place, layers, leaves, inputs)
        gradient = some_like(differentiable(output))
        wanted = jax.vjp(values, leaves, differentiable(inputs))[1](gradient)

        weights = Weights(storage, stage.trunk.prepare(storage.stacked))
        batch = Microbatch(self.batch[0], self.batch[1], (KEY, self.batch[2]))
        arrived = stage.activations.pack(v - 1, inputs) if v else stage.activations.zeros()
        ahead = stage.forward(at, weights, batch, stage.collections.layout.zeros(), arrived)
        packed = stage.gradients.pack(v, gradient)
        found = []
        for split in {False, stage.trunk._program._is_split}:
            back = stage.backward(at, weights, ahead.residuals, packed, FACTOR, split=split)
            grads = self.grads(v, leaves, back.trunk, back.off_trunk)
            if split:
                left = stage.backward_weight(at, weights, ahead.residuals, back.pending)
                grads = jax.tree.map(jnp.add, grads, self.grads(v, leaves, *left))
            input_grad = stage.gradients.unpack(v - 1, back.input_grad) if v else wanted[1]
            found.append((grads, input_grad))
        return (stage.activations.unpack(v, ahead.output), found), (output, wanted)


@pytest.mark.parametrize("case", sweep(1, CASES), ids=str)
def test_forward_and_backward(case: Case) -> None:
    alone = Alone(case)
    inputs = alone.batch[0]
    for v in range(len(alone.stage.cuts)):
        (found, backwards), (output, wanted) = jax.jit(alone.both, static_argnums=0)(v, inputs)
        assert_close(found, output)
        for backward in backwards:
            assert_close(backward, wanted)
        inputs = output


@pytest.mark.parametrize("model", ["linen", "weighted"])
def test_loss(model: str) -> None:
    """Sums as they are, gradients times the cotangent."""
    alone = Alone(Case(model=model, stages=2))
    stage, layers, place = alone.stage, alone.stage.cuts[-1].epilogue, 1
    leaves, labels = alone.leaves(place, layers), alone.batch[1]
    output = some_like(
        jax.eval_shape(lambda: alone.stage.activations.unpack(1, stage.activations.zeros()))
    )

    def loss(leaves: Any, output: Any) -> Any:
        sums = alone.module.loss_terms(alone.run(place, layers, leaves, output), labels).sums()
        return sums[0] * FACTOR, sums

    def both() -> Any:
        batch = Microbatch(None, labels, (KEY, alone.batch[2]))
        collections = stage.collections.layout.zeros()
        packed = stage.activations.pack(1, output)
        result = stage.epilogue.loss_and_gradients(
            alone.storage(place), collections, packed, batch, (FACTOR, FACTOR)
        )
        given = {name: stage.params.grad_layout.get(place, name, result.grads) for name in leaves}
        found = result.sums, given, stage.gradients.unpack(1, result.output_grad)
        (grads, dx), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(leaves, output)
        return found, (sums, grads, differentiable(dx))

    found, wanted = jax.jit(both)()
    assert_close(found, wanted)
