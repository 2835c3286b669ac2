"""A plain GPipe, which shares no code with jaxpipe: `jax.grad` of a scan inside `shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

Layer = Callable[[Any, Any, Any], Any]
"""A layer, called with `(parameters of the model, its input, side)`."""


def _pack(tree: Any, size: int) -> jax.Array:
    """Join all leaves to one vector of `size` numbers, so that stages send equal shapes."""
    parts = [jnp.zeros((size,), jnp.float32)]
    for leaf in reversed(jax.tree.leaves(tree)):
        parts = [*([leaf.imag] if jnp.iscomplexobj(leaf) else []), *parts]
        parts = [leaf.real if jnp.iscomplexobj(leaf) else leaf, *parts]
    return jnp.concatenate([part.astype(jnp.float32).ravel() for part in parts])[:size]


def _unpack(vector: jax.Array, struct: Any) -> Any:
    leaves, start = [], 0

    def take(shape: Any) -> jax.Array:
        nonlocal start
        start += int(np.prod(shape))
        return vector[start - int(np.prod(shape)) : start].reshape(shape)

    for leaf in jax.tree.leaves(struct):
        is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
        x = take(leaf.shape)
        leaves.append(x + 1j * take(leaf.shape) if is_complex else x.astype(leaf.dtype))
    return jax.tree.unflatten(jax.tree.structure(struct), leaves)


def gpipe(
    layers: Sequence[Layer], cut: Sequence[int], terms: Callable[[Any, Any], Any], mesh: Mesh
) -> Callable[[Any, Any], tuple[jax.Array, Any]]:
    """Make a function of `(params, batch)` that returns the loss and the mean gradients.

    Args:
        layers: The model.
        cut: Boundaries of the stages.
        terms: Sum and weight of the losses of a microbatch, `terms(outputs, labels)`.
        mesh: With the axes `stage` and `data`. Every device has all parameters.
    """
    num_stages = mesh.shape["stage"]
    forwards = [(i, i + 1) for i in range(num_stages - 1)]

    def run(stage: int, params: Any, x: Any, side: Any) -> Any:
        for layer in layers[cut[stage] : cut[stage + 1]]:
            x = layer(params, x, side)
        return x

    def device(params: Any, batch: Any) -> Any:
        inputs, labels, side = batch
        num_microbatches = len(jax.tree.leaves(inputs)[0])
        structs = [jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], inputs))]
        one_side = jax.tree.map(lambda x: x[0], side)
        for s in range(num_stages):
            structs.append(jax.eval_shape(lambda x, s=s: run(s, params, x, one_side), structs[-1]))
        size = max(2 * sum(x.size for x in jax.tree.leaves(struct)) for struct in structs)
        stage = jax.lax.axis_index("stage")

        def compute(s: int, params: Any, arrived: jax.Array, m: jax.Array) -> jax.Array:
            entering = jax.tree.map(lambda x: x[m], inputs) if s == 0 else None
            x = entering if s == 0 else _unpack(arrived, structs[s])
            return _pack(run(s, params, x, jax.tree.map(lambda x: x[m], side)), size)

        def summed(params: Any) -> tuple[jax.Array, jax.Array]:
            def tick(carry: Any, t: jax.Array) -> tuple[Any, None]:
                arrived, total, weight = carry
                m = jnp.clip(t - stage, 0, num_microbatches - 1)
                stages = [lambda *x, s=s: compute(s, *x) for s in range(num_stages)]
                x = jax.lax.switch(stage, stages, params, arrived, m)
                one = terms(_unpack(x, structs[-1]), jax.tree.map(lambda x: x[m], labels))
                is_loss = (stage == num_stages - 1) & (t >= stage) & (t - stage < num_microbatches)
                total, weight = (
                    old + jnp.where(is_loss, new, 0.0)
                    for old, new in zip((total, weight), one, strict=True)
                )
                return (jax.lax.ppermute(x, "stage", forwards), total, weight), None

            zero = jnp.zeros((size,), jnp.float32), jnp.float32(0), jnp.float32(0)
            (_, total, weight), _ = jax.lax.scan(
                tick, zero, jnp.arange(num_microbatches + num_stages - 1)
            )
            return total, weight

        # The gradient of this device's losses; `ppermute` passes it on to the other stages.
        (total, weight), grads = jax.value_and_grad(summed, has_aux=True)(params)
        total, weight, grads = jax.lax.psum((total, weight, grads), ("stage", "data"))
        return total / weight, jax.tree.map(lambda g: g / weight, grads)

    mapped = jax.shard_map(
        device, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P(), check_vma=False
    )
    return jax.jit(mapped)
