"""JAX's members of the peers benchmark: the weights, a plain step on one device, and the pipeline.

Run by `benchmarks.peers`: python -m benchmarks._peer_jax CASE [weights]
"""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks._peer_member import ADAM, HEADS, VOCAB, Case, read_case, serve

STAGES = 2


def make_model(case: Case, num_stages: int) -> Any:
    """The GPT of the other benchmarks."""
    from benchmarks._gpt import gpt

    recompute = int(case.recompute)
    settings = {"dim": case.dim, "num_blocks": case.num_blocks, "vocab": VOCAB, "heads": HEADS}
    return gpt(num_stages, **settings, activation_checkpoint_interval=recompute)


def write_weights(case: Case) -> None:
    """Write initial parameters by their path, and the tokens of one batch."""
    from benchmarks._gpt import tokens

    x, y, _ = tokens(case.num_microbatches, case.microbatch_size, case.time)
    params = make_model(case, 1).init(jax.random.key(0), x[0])
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    with Path(case.weights).open("wb") as file:
        np.savez(file, **{"x": x, "y": y, **leaves})


def read_weights(case: Case) -> tuple[dict, np.ndarray, np.ndarray]:
    """The parameter tree and the tokens, labels."""
    params: dict = {}
    with np.load(case.weights) as held:
        for name in set(held.files) - {"x", "y"}:
            *parents, last = name.split("/")
            node = params
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = held[name]
        return params, held["x"], held["y"]


def plain_step(case: Case) -> Callable[[], float]:
    """One device: a scan over microbatches that sums gradients, one update, the state donated."""
    import jax.numpy as jnp
    import optax

    from benchmarks._gpt import cross_entropy

    model = make_model(case, 1)
    params, x, y = read_weights(case)
    optimizer = optax.adam(ADAM["lr"], *ADAM["betas"], eps=ADAM["eps"])

    def loss_fn(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, x, train=True), y)

    def step(state: tuple, x: jax.Array, y: jax.Array) -> tuple:
        params, moments = state

        def accumulate(total: tuple, xy: tuple) -> tuple:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, *xy)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(accumulate, zeros, (x, y))
        updates, moments = optimizer.update(
            jax.tree.map(lambda g: g / len(x), grads), moments, params
        )
        return (optax.apply_updates(params, updates), moments), loss / len(x)

    jitted = jax.jit(step, donate_argnums=0)
    params = jax.tree.map(jnp.asarray, params)
    held = [(params, optimizer.init(params))]

    def run() -> float:
        held[0], loss = jitted(held[0], x, y)
        return float(loss)

    return run


def pipelined_step(case: Case) -> Callable[[], float]:
    """The engine's step on two stages, whatever the number of processes."""
    import optax

    import jaxpipe

    jaxpipe.init_distributed()
    params, x, y = read_weights(case)
    pipeline: dict[str, object] = {"schedule": case.schedule}
    if case.num_chunks > 1:
        pipeline["num_chunks"] = case.num_chunks
    config = {
        "train_micro_batch_size_per_gpu": case.microbatch_size,
        "gradient_accumulation_steps": case.num_microbatches,
        "pipeline": pipeline,
    }
    optimizer = optax.adam(ADAM["lr"], *ADAM["betas"], eps=ADAM["eps"])
    model = make_model(case, STAGES)
    engine = jaxpipe.initialize(
        model=model, config=config, optimizer=optimizer, model_parameters=params
    )[0]
    batches = itertools.cycle(list(zip(x, y, strict=True)))
    return lambda: float(engine.train_batch(batches))


def main() -> None:
    """Be the member that the command line names."""
    case = read_case()
    if sys.argv[2:] == ["weights"]:
        write_weights(case)
    else:
        serve(pipelined_step(case) if case.schedule else plain_step(case))


if __name__ == "__main__":
    main()
