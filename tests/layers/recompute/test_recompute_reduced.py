"""Recompute of layers that are sharded inside a stage.

What they name is not reduced over devices again.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _settings import make_settings
from _tolerances import assert_close
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxpipe import LayerSpec, Pipeline, PipelineModule, PipeModelDataParallelTopology
from jaxpipe.checkpointing import (
    REDUCED,
    RecomputeSettings,
    checkpoint,
    reduced,
    save_reduced,
    save_whole,
)
from jaxpipe.programs.autodiff import without_complex
from jaxpipe.topology import make_pipeline_mesh

DIM, HIDDEN, BLOCKS, MICROBATCHES, MICROBATCH = 8, 24, 4, 4, 2
KEEPS_INPUTS = jax.checkpoint_policies.nothing_saveable


class Block(nn.Module):
    """Two sublayers, each with a sum over devices at its end; recompute needs the first one's."""

    names: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        lecun = nn.initializers.lecun_normal()
        for i in range(2):
            wide = self.param(
                f"wide{i}", nn.with_partitioning(lecun, (None, "model")), (DIM, HIDDEN)
            )
            narrow = self.param(
                f"narrow{i}", nn.with_partitioning(lecun, ("model", None)), (HIDDEN, DIM)
            )
            y = jnp.tanh(nn.LayerNorm(name=f"norm{i}")(x) @ wide) @ narrow
            y = jax.lax.with_sharding_constraint(y, P())
            x = x + (reduced(y) if self.names else y)
        return x


def square_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((outputs - targets) ** 2)


def make_module(
    mark: Callable[[LayerSpec], LayerSpec], num_model: int, names: bool, interval: int
) -> PipelineModule:
    return PipelineModule(
        [mark(LayerSpec(Block, names)) for _ in range(BLOCKS)],
        topology=PipeModelDataParallelTopology(num_pp=2, num_mp=num_model, num_dp=1),
        loss_fn=square_error,
        partition_method="trunk",
        activation_checkpoint_interval=interval,
    )


def make_batch() -> Any:
    x = (
        np.random.default_rng(0)
        .normal(size=(2, MICROBATCHES, MICROBATCH, 3, DIM))
        .astype(np.float32)
    )
    return x[0], x[1], {}


def make_pipeline(
    *,
    mark: Callable[[LayerSpec], LayerSpec] = lambda spec: spec,
    num_model: int = 2,
    names: bool = True,
    interval: int = 0,
    recompute: RecomputeSettings | None = None,
    **settings: Any,
) -> Pipeline:
    module = make_module(mark, num_model, names, interval)
    example = jax.tree.map(lambda x: x[0], make_batch())
    mesh = make_pipeline_mesh(module.topology())
    config = make_settings(**settings)
    return Pipeline(module, optax.sgd(0.1), mesh, example, MICROBATCHES, config, recompute)


def num_reduced(pipeline: Pipeline) -> int:
    """Arrays that the compiled step sums over `model`, one for each that a combined sum has.

    Scalars left out.
    """
    text = (
        pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct).compile().as_text()
        or ""
    )
    shapes = re.findall(r"= (.*) all-reduce(?:-start)?\(.*replica_groups=\[2,2\]<=\[4\],", text)
    return sum(Counter(re.findall(r"\w+\[[\d,]+\]", shape)).total() for shape in shapes)


@functools.cache
def one_device() -> tuple[Any, float, Any]:
    """Parameters, and loss and gradients of the batch."""
    module = make_module(lambda spec: spec, 1, False, 0)
    inputs, labels, _ = make_batch()
    params = module.init(jax.random.key(module.base_seed), inputs[0])

    def loss(params: Any) -> jax.Array:
        return jnp.mean(
            jnp.stack(
                [
                    square_error(module.apply(params, x), t)
                    for x, t in zip(inputs, labels, strict=True)
                ]
            )
        )

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return jax.device_get(params), float(value), jax.device_get(grads)


def remat(policy: Any = None) -> Callable[[LayerSpec], LayerSpec]:
    return lambda spec: spec.remat(policy)


PARTITION = RecomputeSettings(partition_activations=True)
CASES = {
    "kept": {},
    "each layer": {"interval": 1},
    "pairs": {"interval": 2},
    "marked": {"mark": remat()},
    "unnamed": {"names": False, "interval": 1},
    "constraints": {"names": False, "mark": remat(save_whole)},
    "inputs sharded": {"interval": 1, "recompute": PARTITION},
    "split backward": {"interval": 1, "schedule": "zero-bubble"},
    "scanned": {"interval": 1, "scan_trunk": True},
    "own policy": {"mark": remat(KEEPS_INPUTS)},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", sweep(1, ["each layer", *(name for name in CASES if name != "each layer")])
)
def test_gradients_are_those_of_one_device(case: str) -> None:
    pipeline = make_pipeline(**CASES[case])
    params, loss, grads = one_device()
    metrics, storage, _ = pipeline.gradients(pipeline.states.init_from(params), make_batch())
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert_close(pipeline.params_tree(storage), grads)


@pytest.mark.parametrize(
    "case", sweep(0, ["each layer", "marked", "constraints", "scanned", "split backward"])
)
def test_nothing_is_reduced_again(case: str) -> None:
    settings = {
        name: value for name, value in CASES[case].items() if name in ("schedule", "scan_trunk")
    }
    kept, recomputed = make_pipeline(**settings), make_pipeline(**CASES[case])
    assert recomputed.sizes.residual_bytes[0] < kept.sizes.residual_bytes[0]
    assert num_reduced(recomputed) == num_reduced(kept)


@pytest.mark.parametrize("case", sweep(0, [{"names": False, "interval": 1}, CASES["own policy"]]))
def test_what_is_not_named_or_not_kept_is_reduced_again(case: dict[str, Any]) -> None:
    # In each of the two blocks of a stage, in the ticks with a backward and those after the last
    # forward.
    assert num_reduced(make_pipeline(**case)) >= num_reduced(make_pipeline()) + BLOCKS // 2


@pytest.mark.soak
def test_where_inputs_are_sharded_names_save_the_sums_alike() -> None:
    # More sums than without: what is computed from inputs that are sharded by features sums over
    # them.
    unnamed = make_pipeline(names=False, interval=1, recompute=PARTITION)
    assert (
        num_reduced(make_pipeline(**CASES["inputs sharded"])) <= num_reduced(unnamed) - BLOCKS // 2
    )


def test_a_named_value_is_kept_once_a_layer() -> None:
    """What ends a layer is not kept: its backward needs nothing of it."""
    inputs_alone, named = make_pipeline(names=False, interval=1), make_pipeline(interval=1)
    assert named.sizes.residual_bytes[0] == 2 * inputs_alone.sizes.residual_bytes[0]
    assert (
        make_pipeline(mark=remat(KEEPS_INPUTS)).sizes.residual_bytes
        == inputs_alone.sizes.residual_bytes
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep(1, ["each layer", "marked", "inputs sharded", "scanned"]))
@pytest.mark.filterwarnings("ignore:No effect")
def test_without_an_axis_to_reduce_over_names_change_nothing(case: str) -> None:
    def lowered(names: bool) -> str:
        pipeline = make_pipeline(**{**CASES[case], "num_model": 1, "names": names})
        return pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct).as_text()

    assert lowered(True) == lowered(False)


@pytest.mark.slow
def test_the_bytes_of_residuals_are_those_of_one_device() -> None:
    one, two, four = (
        make_pipeline(num_model=length).sizes.residual_bytes[0] for length in (1, 2, 4)
    )
    # Of each sublayer the hidden values, which are sharded as its weights are.
    hidden = BLOCKS // 2 * 2 * MICROBATCH * 3 * HIDDEN * 4
    assert (one - two, one - four) == (hidden // 2, hidden // 4 * 3)


class Branching(nn.Module):
    """A branch that recomputes, and names its first sum over devices."""

    name_of_sum: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        w = self.param("w", init, (DIM, HIDDEN))

        def one(x: jax.Array) -> jax.Array:
            y = checkpoint_name(jnp.tanh(x @ w) @ w.T, self.name_of_sum)
            return x + jnp.tanh(y @ w) @ w.T

        return jax.lax.cond(x.sum() > 0, lambda x: checkpoint(one, x), jnp.sin, x)


def test_branches_keep_what_is_named() -> None:
    def kept(name: str) -> int:
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
        layers = [LayerSpec(Branching, name) for _ in range(BLOCKS)]
        module = PipelineModule(
            layers, topology=topology, loss_fn=square_error, partition_method="trunk"
        )
        x = make_batch()[0][0]
        return Pipeline(
            module, optax.sgd(0.1), make_pipeline_mesh(topology), (x, x), 2
        ).sizes.residual_bytes[0]

    size = make_batch()[0][0].nbytes
    assert kept(REDUCED) == kept("another") + BLOCKS // 2 * size


def test_complex_values_are_recomputed() -> None:
    x = jnp.ones(3)
    every = without_complex(jax.checkpoint_policies.everything_saveable)
    for policy in (save_reduced, save_whole, every):
        run = jax.checkpoint(lambda x: jnp.abs(reduced(jnp.exp(1j * x)) ** 2), policy=policy)
        np.testing.assert_allclose(
            jax.grad(lambda x, run=run: run(x).sum())(x), jnp.zeros(3), atol=1e-6
        )


def test_trees_are_named() -> None:
    closed = jax.make_jaxpr(lambda x: reduced({"a": x, "b": [x]}))(1.0)
    assert [eqn.params["name"] for eqn in closed.eqns] == [REDUCED, REDUCED]
