"""One stage of a pipeline as a program of one device.

The step is traced for the devices of the whole pipeline, none of which need be there, and the
program of a device is taken out of its `shard_map`. An exchange gives noise in place of what a
neighbour would send, for a GPU multiplies zeros faster; a sum over the mesh gives what it gets; and
the stage's number is an argument. What is left is the stage's own work: its kernels, rings of
activations, sums of gradients, loops over ticks, branches and update.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe
from benchmarks.gpu_program._jobs import Job
from jaxpipe._util.typing import PyTree
from jaxpipe.core.planner import absent_devices
from jaxpipe.forecast import Hardware
from jaxpipe.optim import LossScaler
from jaxpipe.programs.jaxpr import (
    ClosedJaxpr,
    Literal,
    ScanForm,
    bind_here,
    branches_of,
    called_program,
    programs_inside,
    scan_form,
    scope_of,
)
from jaxpipe.programs.jaxpr import primitives as names

_EXCHANGE = "ppermute"
_SUMS = {"psum", "psum_invariant", "pmax", "pmin", "pvary"}
_SHARED = {"all_gather", "reduce_scatter", "all_to_all"}


class OneStage:
    """A stage of a job, on the device that JAX uses first.

    Args:
        job: The job.
        hardware: The GPUs that the whole pipeline would run on.

    Attributes:
        step: `step(stage, state, batch) -> (state, metrics)`, jitted, the state donated.
    """

    def __init__(self, job: Job, hardware: Hardware) -> None:
        self._pipeline = job.pipeline(tuple(absent_devices(hardware, job.num_devices)))
        args = self._pipeline.states.struct, self._pipeline.batches.struct
        closed, out = jax.make_jaxpr(self._pipeline.step, return_shape=True)(*args)
        result = jax.tree.structure(out)

        # The name by which the compiler's dumps are found.
        def train_step(stage: jax.Array, state: PyTree, batch: PyTree) -> PyTree:
            values = _results(closed, jax.tree.leaves((state, batch)), stage)
            return jax.tree.unflatten(result, values)

        self.step = jax.jit(train_step, donate_argnums=1)

    @property
    def pipeline(self) -> jaxpipe.Pipeline:
        """The whole pipeline."""
        return self._pipeline

    @property
    def structs(self) -> tuple[Any, Any, Any]:
        """Shapes and dtypes of the step's arguments."""
        state, batch = map(_local, (self._pipeline.states.struct, self._pipeline.batches.struct))
        return jax.ShapeDtypeStruct((), jnp.int32), state, batch

    def example(self, vocab: int) -> tuple[PyTree, PyTree]:
        """A state of random parameters and a batch of random tokens."""
        _, state, batch = self.structs
        key = jax.random.key(0)

        def zeros(struct: Any) -> jax.Array:
            return key if _is_key(struct) else jnp.zeros(struct.shape, struct.dtype)

        def drawn(struct: Any) -> jax.Array:
            return 0.02 * jax.random.normal(key, struct.shape, struct.dtype)

        scaler = LossScaler.from_config(self._pipeline.plan.config)
        tokens = np.random.default_rng(0).integers
        return (
            dataclasses.replace(
                jax.tree.map(zeros, state),
                params=jax.tree.map(drawn, state.params),
                loss_scale=scaler.init() if scaler else (),
            ),
            jax.tree.map(lambda x: jnp.asarray(tokens(0, vocab, x.shape), x.dtype), batch),
        )


def _local(tree: PyTree) -> PyTree:
    """The part of each array that one device has."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(one, tree)


def _is_key(struct: Any) -> bool:
    return jnp.issubdtype(struct.dtype, jax.dtypes.prng_key)


def _results(closed: ClosedJaxpr, args: Sequence[Any], stage: jax.Array) -> list[Any]:
    """The results of a program, on one device."""
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def read(x: Any) -> Any:
        # A number that was made on the mesh remembers it.
        return np.asarray(x.val) if isinstance(x, Literal) else values[x]

    for eqn in jaxpr.eqns:
        results = _equation(eqn, [read(x) for x in eqn.invars], stage)
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _equation(eqn: Any, args: list[Any], stage: jax.Array) -> Sequence[Any]:
    """The results of an equation.

    Control flow is built anew, so that bodies may look at the stage.
    """

    def on_one(closed: ClosedJaxpr) -> Callable[..., tuple]:
        return lambda *values: tuple(_results(closed, values, stage))

    name = eqn.primitive.name
    if (found := _alone(eqn, args, stage)) is not None:
        return found
    if name == names.SHARD_MAP:
        return on_one(programs_inside(eqn)[0])(*args)
    if (called := called_program(eqn)) is not None:
        return on_one(called)(*args)
    if (form := scan_form(eqn)) is not None:
        return _scan(form, args, on_one(form.body))
    if name == names.WHILE:
        return _while(eqn, args, on_one)
    if branches := branches_of(eqn):
        return jax.lax.switch(args[0], [on_one(branch) for branch in branches], *args[1:])
    with jax.named_scope(scope_of(eqn)):
        return bind_here(eqn, args)


def _alone(eqn: Any, args: list[Any], stage: jax.Array) -> Sequence[Any] | None:
    """What an equation that speaks of the mesh gives where there is none; None: it does not."""
    name = eqn.primitive.name
    if name == "axis_index":
        return [stage if eqn.params["axis_name"] == "stage" else jnp.int32(0)]
    if name == _EXCHANGE:
        return [_noisy(x) for x in args]
    if name in _SUMS:
        return args
    if name in _SHARED:
        shapes = [x.aval.shape for x in eqn.outvars]
        return [jnp.resize(x, shape) for x, shape in zip(args, shapes, strict=True)]
    return None


def _noisy(x: jax.Array) -> jax.Array:
    """Numbers below 1 that depend on the values, so that what makes these is not left out."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    noise = jnp.sin(1.7 * jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    return noise.astype(x.dtype) + x * 2**-20


def _scan(form: ScanForm, args: list[Any], body: Callable[..., tuple]) -> Sequence[Any]:
    first, end = form.num_consts, form.num_consts + form.num_carry

    def turn(carry: tuple, sliced: tuple) -> tuple[tuple, tuple]:
        results = body(*args[:first], *carry, *sliced)
        return results[: form.num_carry], results[form.num_carry :]

    carry, stacked = jax.lax.scan(turn, tuple(args[first:end]), tuple(args[end:]), **form.settings)
    return *carry, *stacked


def _while(
    eqn: Any, args: list[Any], on_one: Callable[[ClosedJaxpr], Callable[..., tuple]]
) -> Sequence[Any]:
    goes_on, body = on_one(eqn.params["cond_jaxpr"]), on_one(eqn.params["body_jaxpr"])
    first = eqn.params["cond_nconsts"]
    end = first + eqn.params["body_nconsts"]
    return jax.lax.while_loop(
        lambda carry: goes_on(*args[:first], *carry)[0],
        lambda carry: body(*args[first:end], *carry),
        tuple(args[end:]),
    )
