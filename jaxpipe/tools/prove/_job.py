"""The job that is proved: a small copy of the user's, on simulated devices."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe._util.typing import PyTree
from jaxpipe.config import Collector, TrainConfig, load_config
from jaxpipe.core.pipeline import ConfigLike, Pipeline, prepare, running_mesh
from jaxpipe.data import Batch, split_entry
from jaxpipe.distributed.topology import FSDP, ProcessTopology, make_pipeline_mesh
from jaxpipe.errors import ConfigError, DataError, JaxpipeError, TopologyError, shown
from jaxpipe.layers import ModelTrace, PipelineModule, flatten_dict
from jaxpipe.layers.recompute import settings_for

from ._plain import Optimizer, Plain, Start
from ._wide import wide_module

_GROWS_AFTER = 2
"""Steps after which a dynamic loss scale grows in a proof, and overflows that lower it."""

STEPS = 3
"""Steps of a proof, without those that show how a loss scale moves."""

_OVERFLOWING = 2.0**40
"""A loss scale at which gradients overflow in float16, and their squares do not in float32."""


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a proof."""

    name: str
    # The dtype that parameters and inputs are cast to. None: as the job has them.
    compute_dtype: str | None

    @property
    def is_double(self) -> bool:
        """Whether everything is in float64."""
        return self.compute_dtype == "float64"

    def enabled(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which JAX computes in these dtypes."""
        return jax.enable_x64(True) if self.is_double else contextlib.nullcontext()


DOUBLE = Precision("float64", "float64")
OWN = Precision("the job's dtypes", None)


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A model, its configuration and its data, at the sizes of the proof.

    What its methods make of them is made once, because compiling takes most of a proof's time.
    """

    module: PipelineModule
    config: TrainConfig
    example: Batch
    mesh: jax.sharding.Mesh
    topology: ProcessTopology
    # The user's optimiser, if it is not the configuration's, and the one that is used.
    given_optimizer: optax.GradientTransformation | None
    transformation: optax.GradientTransformation
    # Samples of a replica's microbatch.
    microbatch_size: int
    # Samples of a microbatch on all devices.
    num_samples: int
    num_microbatches: int
    # Devices along `fsdp` compute one microbatch together.
    num_replicas: int
    _made: dict[tuple[str, Precision], Any] = dataclasses.field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        model: PipelineModule,
        config: ConfigLike,
        example_batch: Sequence[PyTree],
        optimizer: optax.GradientTransformation | None,
        axes: Mapping[str, int],
    ) -> "Job":
        """Put a model on simulated devices."""
        errors = Collector()
        config = load_config(config, errors)
        model = on_simulated(model, config, axes)
        topology = topology_of(model)
        lengths = axes_of(topology)
        config = _sized(config, lengths["data"])
        num_devices = math.prod(lengths.values())
        if num_devices > jax.device_count():
            raise TopologyError(
                f"a proof must have a simulated device for each of {lengths}, but got "
                f"{jax.device_count()} devices. Call jax.config.update('jax_num_cpu_devices', "
                f"{num_devices}) before anything else uses JAX, or run jaxpipe prove."
            )
        mesh = make_pipeline_mesh(topology, jax.devices()[:num_devices])
        prepared = prepare(model, config, optimizer, None, mesh, errors)
        if prepared.chosen.transformation is None:
            raise ConfigError(
                "a proof must have an optimizer, but got optimizer=None and a configuration "
                "without the section optimizer. Pass for example optax.adamw(3e-4)."
            )
        size = prepared.sizes.train_micro_batch_size_per_gpu
        steps = prepared.sizes.gradient_accumulation_steps
        running = running_mesh(prepared.mesh, config).shape
        return cls(
            prepared.model,
            config,
            split_entry(example_batch, "the example batch"),
            prepared.mesh,
            topology,
            optimizer,
            prepared.chosen.transformation,
            size,
            size * running["data"] * running.get(FSDP, 1),
            _microbatches(model.num_stages, steps),
            running["data"],
        )

    @property
    def num_terms(self) -> int:
        """Terms of a sum of gradients, which are also added up over `fsdp`."""
        return self.num_microbatches * self.num_samples // self.microbatch_size

    def batch(self, seed: int) -> Batch:
        """Make a batch from the example's values, in another order for each seed."""
        rng = np.random.default_rng(seed)
        rows = self.num_microbatches * self.num_samples
        return Batch(
            *(
                jax.tree.map(lambda x, mixes=mixes: self._drawn(x, rng, rows, mixes=mixes), part)
                for part, mixes in zip(self.example, (True, True, False), strict=True)
            )
        )

    def _drawn(self, leaf: Any, rng: np.random.Generator, rows: int, *, mixes: bool) -> np.ndarray:
        shape = (rows, *leaf.shape[1:])
        if isinstance(leaf, jax.ShapeDtypeStruct):
            drawn = rng.standard_normal(shape)
            values = drawn if jnp.issubdtype(leaf.dtype, jnp.inexact) else drawn > 0
            values = values.astype(leaf.dtype)
        else:
            values = np.asarray(leaf)[rng.integers(0, leaf.shape[0], rows)]
            if mixes:
                values = rng.permuted(values.reshape(rows, -1), axis=1).reshape(shape)
        return values.reshape(self.num_microbatches, self.num_samples, *shape[1:])

    def config_in(self, precision: Precision) -> TrainConfig:
        """Return the configuration for a precision: without loss scale and casts in float64."""
        if not precision.is_double:
            scale = self.loss_scale(precision)
            if scale is None or self.config.fp16.loss_scale:
                return self.config
            # A dynamic scale begins where training finds it, so that no step overflows. It moves
            # after few steps, so that a proof sees it move.
            fp16 = dataclasses.replace(
                self.config.fp16,
                initial_scale_power=int(math.log2(scale)),
                loss_scale_window=_GROWS_AFTER,
                hysteresis=min(self.config.fp16.hysteresis, _GROWS_AFTER),
            )
            return dataclasses.replace(self.config, fp16=fp16)
        off = {
            name: dataclasses.replace(getattr(self.config, name), enabled=False)
            for name in ("fp16", "bf16")
        }
        types = dataclasses.replace(self.config.data_types, grad_accum_dtype=None)
        return dataclasses.replace(self.config, **off, data_types=types)

    @functools.cached_property
    def not_double(self) -> str:
        """Why layers do not compute in float64. Empty if they do."""
        self.pipeline(OWN)  # raises for what is wrong in any dtype
        try:
            with DOUBLE.enabled():
                self.pipeline(DOUBLE)
        except JaxpipeError as error:
            return str(error)
        return ""

    @property
    def finest(self) -> Precision:
        """float64, or the job's dtypes if its layers do not compute in float64."""
        return OWN if self.not_double else DOUBLE

    def _once(self, what: str, precision: Precision, make: Callable[[Precision], Any]) -> Any:
        """Make something for a precision, unless it has been made."""
        key = what, precision
        if key not in self._made:
            self._made[key] = make(precision)
        return self._made[key]

    def module_in(self, precision: Precision) -> PipelineModule:
        """Return the module for a precision."""
        return self._wide_module if precision.is_double else self.module

    @functools.cached_property
    def _wide_module(self) -> PipelineModule:
        return wide_module(self.module)

    def batch_in(self, precision: Precision, seed: int) -> Batch:
        """Return a batch for a precision."""
        batch = self.batch(seed)
        return jax.tree.map(as_double, batch) if precision.is_double else batch

    def pipeline(self, precision: Precision) -> Pipeline:
        """Return the job's pipeline."""
        return self._once("pipeline", precision, self._pipeline)

    def _pipeline(self, precision: Precision) -> Pipeline:
        entry = jax.tree.map(lambda x: x[0], self.batch_in(precision, 0))
        return self.pipeline_of(self.module_in(precision), entry, precision)

    def pipeline_of(self, module: PipelineModule, example: Batch, precision: Precision) -> Pipeline:
        """Build the pipeline of a module, which may be another than the job's."""
        config = self.config_in(precision)
        parts = None
        # What "auto" leaves open is decided once, in the job's dtypes, so that all claims are about
        # the same schedule, cut and split of the vocabulary.
        if module is not self.module:
            first = self.pipeline(OWN)
            config = dataclasses.replace(config, pipeline=first.plan.config.pipeline)
            parts = first.plan.parts
        return Pipeline(
            module,
            self.transformation,
            self.mesh,
            example,
            self.num_microbatches,
            config,
            settings_for(config, self.mesh),
            parts,
        )

    def plain(self, precision: Precision) -> Plain:
        """Return the plain program."""
        return self._once("plain", precision, self._plain)

    def _plain(self, precision: Precision) -> Plain:
        dtype = None if precision.is_double else self.config.data_types.grad_accum_dtype
        return Plain(self.module_in(precision), self.num_replicas, dtype)

    def loss_scale(self, precision: Precision) -> float | None:
        """Return the loss scale. None: the job or the precision has none."""
        if precision.is_double or not self.config.fp16.enabled:
            return None
        return self._once("loss scale", precision, self._loss_scale)

    def _loss_scale(self, precision: Precision) -> float:
        fp16 = self.config.fp16
        scale = fp16.loss_scale or 2.0**fp16.initial_scale_power
        # As training finds a dynamic scale: halved until no gradient overflows.
        while not self._is_finite(precision, scale):
            if fp16.loss_scale or scale < 2 * fp16.min_loss_scale:
                raise ConfigError(
                    "fp16.loss_scale must leave gradients finite, but the plain program's "
                    f"overflow at {scale:g}. Lower fp16.loss_scale or fp16.min_loss_scale, or "
                    "use bf16."
                )
            scale /= 2
        # Twice more, because gradients were those of the first parameters, which move.
        return fp16.loss_scale or max(scale / 4, fp16.min_loss_scale)

    def _is_finite(self, precision: Precision, scale: float) -> bool:
        plain = self.plain(precision)
        start = self.start(precision)
        batches = (self.batch_in(precision, step) for step in range(STEPS))
        return all(
            plain.gradients(start, batch, step, loss_scale=scale).is_finite
            for step, batch in enumerate(batches)
        )

    @functools.cached_property
    def optimizer(self) -> Optimizer:
        """The optimiser of the plain program."""
        return Optimizer(self.transformation, self.config, self.module.trainable, self._trace)

    @functools.cached_property
    def _trace(self) -> ModelTrace:
        """The model on one device."""
        inputs, _, side = self.batch(0)
        return self.module.trace(*jax.tree.map(lambda x: x[0], (inputs, side)))

    def scales(self, precision: Precision) -> list[float | None]:
        """Return the loss scale to set before each step of a proof. None: as it has become."""
        scale = self.loss_scale(precision)
        steps: list[float | None] = [None] * STEPS
        if scale is None:
            return steps
        # Further steps overflow, which must change the scale alone. The last one does not, and
        # shows that training goes on from there.
        overflows = [_OVERFLOWING, *[None] * (_GROWS_AFTER - 1)]
        return [*steps, *overflows, scale]

    def start(self, precision: Precision) -> Start:
        """Return the parameters and collections that both programs start from."""
        return self._once("start", precision, self._start)

    def _start(self, precision: Precision) -> Start:
        module = self.module_in(precision)
        one = jax.tree.map(
            lambda x: x[0, : self.num_samples // self.num_replicas], self.batch_in(precision, 0)
        )
        key = jax.random.key(module.base_seed)
        params = module.init(key, one.inputs, side=one.side)
        collections = module.init_collections(key, one.inputs, side=one.side)
        return Start(*jax.device_get((params, collections)))


def on_simulated(
    model: PipelineModule, config: TrainConfig, axes: Mapping[str, int]
) -> PipelineModule:
    """Return a model on its stages, two or three replicas, its own further axes and `axes`."""
    own = {} if model.given_topology is None else axes_of(model.given_topology)
    if taken := {"data", "pipe", "stage"} & set(axes):
        raise ConfigError(
            f"axes must be further axes of the mesh, but got {sorted(taken)[0]!r}. A proof has "
            f"the model's {model.num_stages} stages and few replicas. Leave it out."
        )
    # The model's own axes stay, because layers may name them in constraints. A length that divides
    # their own divides the dims that they divide.
    further = {**{name: least_divisor(length) for name, length in own.items()}, **axes}
    others = model.num_stages * math.prod(
        length for name, length in further.items() if name not in ("data", "pipe")
    )
    # Three show a sum over `data` that is right for powers of two alone. From ZeRO 2 on replicas
    # divide the dims of weights, few of which are multiples of three.
    suffice = config.zero_optimization.stage < 2 and 3 * others <= jax.device_count()
    return model.replace(topology=made_topology(model.num_stages, 3 if suffice else 2, further))


def made_topology(num_stages: int, num_replicas: int, axes: Mapping[str, int]) -> ProcessTopology:
    """Make a topology of stages, replicas, and the further ones of the given axes."""
    lengths = {**axes, "pipe": num_stages, "data": num_replicas}
    names = ["pipe", "data", *(name for name in axes if name not in ("pipe", "data"))]
    return ProcessTopology(names, [lengths[name] for name in names])


def least_divisor(length: int) -> int:
    """Return the smallest divisor above 1. It is 1 for 1."""
    return next((n for n in range(2, length + 1) if length % n == 0), 1)


def topology_of(model: PipelineModule) -> ProcessTopology:
    """Return the topology of a model from `on_simulated`."""
    assert model.given_topology is not None
    return model.given_topology


def axes_of(topology: ProcessTopology) -> dict[str, int]:
    """Return the axes of a topology with their lengths, in order."""
    return {name: topology.get_dim(name) for name in topology.get_axis_names()}


def named(kind: str, tree: PyTree) -> dict[str, Any]:
    """Name the leaves of a tree of parameters: `kind/layers/3_Block/kernel`."""
    return {f"{kind}/{'/'.join(path)}": x for path, x in flatten_dict(tree).items()}


def _sized(config: TrainConfig, num_replicas: int) -> TrainConfig:
    """Return the configuration for another number of replicas, at the same microbatch size."""
    micro = config.train_micro_batch_size_per_gpu
    total = config.train_batch_size
    number = config.gradient_accumulation_steps
    if total is None:
        return config
    # The total goes: a job's sizes multiply to it for its own number of replicas alone.
    if micro is None:
        micro = max(total // (number or 1) // num_replicas, 1)
    return dataclasses.replace(
        config,
        train_batch_size=None,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=number or max(total // (micro * num_replicas), 1),
    )


def _microbatches(num_stages: int, given: int) -> int:
    """Return the proof's number of microbatches, at least 3."""
    # Odd, because that shows a mean that is right for powers of two alone. Above twice the number
    # of stages if the job has as many, so that the schedule has a steady part.
    return min(max(given, 2), 2 * num_stages) | 1


def check_example(example_batch: Sequence[PyTree]) -> None:
    """Raise DataError unless all leaves of an entry are arrays or shapes with samples."""
    for leaf in jax.tree.leaves(split_entry(example_batch, "the example batch")):
        shape = getattr(leaf, "shape", ())
        if not shape or not shape[0]:
            raise DataError(
                "leaves of the example batch must be arrays or shapes [samples, ...] with at least "
                f"one sample, but got {shown(leaf)}. Use numpy.asarray, or jax.ShapeDtypeStruct."
            )
        if is_key(leaf):
            raise DataError(
                "leaves of the example batch must be numbers, but got random keys "
                f"{shown(leaf)}. Layers get keys from the pipeline; leave them out."
            )


def is_key(x: Any) -> bool:
    """Whether this is an array of typed random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def as_double(x: Any) -> Any:
    """Widen an array of floats to float64. Keys stay as they are."""
    if is_key(x):
        return x
    x = np.asarray(x)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
