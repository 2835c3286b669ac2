"""The plain program: the same model, batch and optimiser, one microbatch after another.

It runs on one device and adds up with NumPy in float64. Of the engine it uses neither code nor
rules: weights, clipping, averages, loss scales and frozen parameters follow the definitions in the
documentation.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe._util.typing import PyTree
from jaxpipe.config import FP16Section, TrainConfig
from jaxpipe.data import Batch
from jaxpipe.layers import ModelTrace, PipelineModule, flatten_dict, unflatten_dict
from jaxpipe.optim import for_matrices

from ._shake import Shaking, shaken, shaken_module

_EPSILON = 1e-6
"""DeepSpeed and PyTorch add this to the norm before they clip by it."""


class Start(NamedTuple):
    """What a program starts from."""

    params: PyTree
    # By layer, of those that have any.
    collections: Mapping[str, PyTree]


class Shake(NamedTuple):
    """Additional roundings of a plain program, of directions that `seed` decides."""

    seed: int
    # How many each term of a sum of gradients gets, where a value between layers gets one.
    of_sums: float
    # The least relative move of a value between layers.
    least: float


class Gradients(NamedTuple):
    """The result of one training batch."""

    # It contains the losses that layers add.
    loss: np.float64
    # Means over the batch, in float64.
    grads: PyTree
    # The same of the absolute values of the gradients of single microbatches.
    sizes: PyTree
    # After the batch, averaged over the replicas.
    collections: Mapping[str, PyTree]
    # Means over the batch, by kind and name.
    reports: dict[str, np.float64]

    @property
    def is_finite(self) -> bool:
        """Whether no gradient overflowed."""
        return all(np.isfinite(x).all() for x in jax.tree.leaves(self.grads))


class Evaluated(NamedTuple):
    """The result of an evaluation: the loss of the batch, and what each microbatch gives."""

    loss: np.float64
    # Sums of the losses of samples.
    sums: list[float]
    outputs: list[PyTree]


def microbatch_of(batch: Batch, microbatch: int, replica: int, num_replicas: int) -> Batch:
    """Return the samples of one microbatch that belong to one replica."""

    def block(x: Any) -> Any:
        size = x.shape[1] // num_replicas
        return x[microbatch, replica * size : (replica + 1) * size]

    return jax.tree.map(block, batch)


class Plain:
    """The plain program of a model. `shake` adds roundings, between layers and of gradient sums."""

    def __init__(self, module: PipelineModule, num_replicas: int, sum_dtype: Any = None) -> None:
        self._module = module
        self._num_replicas = num_replicas
        self._sum_dtype = sum_dtype
        self._key = jax.random.key(module.base_seed)
        self._differentiate = jax.jit(jax.value_and_grad(self._objective, has_aux=True))
        self._evaluate = jax.jit(self._outputs)
        self._weight = jax.jit(self._weight_of)

    def gradients(
        self,
        start: Start,
        batch: Batch,
        step: int,
        shake: Shake | None = None,
        loss_scale: float | None = None,
    ) -> Gradients:
        """Compute the loss and the mean gradients of a batch, and the collections after it."""
        places = self._places(batch)
        num_terms = len(places)
        # Before anything is differentiated: a backward that clips or rounds is not linear.
        weight = sum(
            float(self._weight(start.params, start.collections, self._one(batch, m, r)))
            for m, r in places
        )
        scale = 1.0 if loss_scale is None else loss_scale
        # The factors of losses are float32. A layer's loss has the same weight in every microbatch.
        factors = tuple(
            float(np.float32(scale) / np.float32(divisor)) for divisor in (weight or 1.0, num_terms)
        )
        share = float(np.float32(1) / np.float32(weight or 1.0))
        with np.errstate(invalid="ignore"):  # infinities of both signs are added
            found = self._add_up(start, batch, step, factors, shake)
            # The loss scale is a factor of the loss that is differentiated.
            grads, sizes = (
                jax.tree.map(lambda x: x / scale, found[name]) for name in ("grads", "sizes")
            )
            if shake is not None:
                grads = self._shaken_sums(grads, sizes, start.params, shake)
        held = jax.tree.map(lambda *xs: _mean(xs), *found["collections"])
        loss = np.float64(found["loss"] * share + found["added"] / num_terms)
        reports = {
            name: np.float64(value * (share if name.startswith("loss_fn/") else 1 / num_terms))
            for name, value in found["reports"].items()
        }
        return Gradients(loss, grads, sizes, held, reports)

    def _shaken_sums(self, grads: PyTree, sizes: PyTree, params: PyTree, shake: Shake) -> PyTree:
        """Move sums of gradients as far as roundings of their terms may."""
        rng = np.random.default_rng(shake.seed)

        def moved(grad: Any, size: Any, param: Any) -> Any:
            # A pipeline adds up the gradients of microbatches in this dtype.
            dtype = self._sum_dtype or jnp.promote_types(param.dtype, jnp.float32)
            # A sum of exactly 0 is one of whole numbers, such as loads, which nothing rounds.
            signs = (rng.integers(0, 2, np.shape(grad)) * 2.0 - 1.0) * (grad != 0)
            return grad + shake.of_sums * float(jnp.finfo(dtype).eps) * signs * size

        return jax.tree.map(moved, grads, sizes, params)

    def evaluate(
        self,
        start: Start,
        batch: Batch,
        shake: Shake | None = None,
        counts: Sequence[int] | None = None,
    ) -> Evaluated:
        """Compute losses and outputs of a batch outside training.

        Of each microbatch the first `counts` samples count in the loss. None: all of them.
        """
        params, shaking = _shaken(start.params, shake)
        sums = [0.0] * jax.tree.leaves(batch.inputs)[0].shape[0]
        divisor = 0.0
        outputs = []
        for m, r in self._places(batch):
            one = self._one(batch, m, r)
            found = self._evaluate(params, start.collections, one, shaking)
            total, weight, output = jax.device_get(found)
            outputs.append(output)
            size = jax.tree.leaves(one.inputs)[0].shape[0]
            # Samples fill the replicas in order, so that the last ones have fewer or none.
            count = size if counts is None else min(max(counts[m] - r * size, 0), size)
            if 0 < count < size:
                given = cut_samples((output, one.labels), size, slice(count))
                total, weight, _ = self._module.loss_terms(*given)
            if count:
                # A mean is one of samples.
                sums[m] += float(total) * (count if weight is None else 1)
                divisor += count if weight is None else float(weight)
        joined = [
            jax.tree.map(
                lambda *xs: np.concatenate([np.atleast_1d(x) for x in xs]),
                *outputs[m * self._num_replicas : (m + 1) * self._num_replicas],
            )
            for m in range(len(sums))
        ]
        return Evaluated(np.float64(sum(sums) / (divisor or 1.0)), sums, joined)

    def _one(self, batch: Batch, microbatch: int, replica: int) -> Batch:
        return microbatch_of(batch, microbatch, replica, self._num_replicas)

    def _places(self, batch: Batch) -> list[tuple[int, int]]:
        number = jax.tree.leaves(batch.inputs)[0].shape[0]
        return [(m, r) for m in range(number) for r in range(self._num_replicas)]

    def _add_up(
        self,
        start: Start,
        batch: Batch,
        step: int,
        factors: tuple[float, ...],
        shake: Shake | None,
    ) -> dict[str, Any]:
        params, shaking = _shaken(start.params, shake)
        held: list[Any] = [start.collections] * self._num_replicas
        grads = sizes = None
        loss = added = 0.0
        reports: dict[str, float] = {}
        for m, r in self._places(batch):
            # The pipeline's key of this microbatch, so that dropout draws the same masks.
            key = functools.reduce(jax.random.fold_in, (step, m, r), self._key)
            one = self._one(batch, m, r)
            # A replica hands its collections, such as statistics, from microbatch to microbatch.
            found = self._differentiate(params, held[r], one, key, factors, shaking)
            (_, (value, of_layers, held[r], aux)), grad = jax.device_get(found)
            grad = jax.tree.map(lambda x: np.asarray(x, _wide(x)), grad)
            size = jax.tree.map(np.abs, grad)
            grads = grad if grads is None else jax.tree.map(np.add, grads, grad)
            sizes = size if sizes is None else jax.tree.map(np.add, sizes, size)
            loss += float(value)
            added += float(of_layers)
            for kind, values in aux.items():
                for name, x in values.items():
                    label = f"{kind}/{name}"
                    reports[label] = reports.get(label, 0.0) + float(x)
        return {
            "loss": loss,
            "added": added,
            "reports": reports,
            "grads": grads,
            "sizes": sizes,
            "collections": held,
        }

    def _objective(
        self,
        params: PyTree,
        collections: Mapping[str, PyTree],
        batch: Batch,
        key: jax.Array,
        factors: tuple[Any, ...],
        shaking: Shaking | None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        outputs, held, aux = self._layers(shaking).call(
            params, collections, batch.inputs, train=True, key=key, side=batch.side
        )
        terms = self._module.loss_terms(outputs, batch.labels)
        added = sum(aux["losses"].values(), 0.0)
        weight = 1.0 if terms.weight is None else terms.weight
        factor, of_added = factors
        loss = terms.total * factor + added * of_added
        # A mean over nothing is NaN, and its weight is 0.
        of_loss = {name: jnp.where(weight == 0, 0, x * weight) for name, x in terms.metrics.items()}
        return loss, (terms.total, added, held, {**aux, "loss_fn": of_loss})

    def _layers(self, shaking: Shaking | None) -> PipelineModule:
        return self._module if shaking is None else shaken_module(self._module, shaking)

    def _outputs(
        self,
        params: PyTree,
        collections: Mapping[str, PyTree],
        batch: Batch,
        shaking: Shaking | None = None,
    ) -> tuple[jax.Array, Any, PyTree]:
        outputs, _, _ = self._layers(shaking).call(
            params, collections, batch.inputs, side=batch.side
        )
        terms = self._module.loss_terms(outputs, batch.labels)
        return terms.total, terms.weight, outputs

    def _weight_of(self, *given: Any) -> Any:
        """Return the weight of a microbatch. XLA drops the layers, on which it does not depend."""
        _, weight, _ = self._outputs(*given)
        return 1.0 if weight is None else weight


class LossScale:
    """The loss scale of float16, moved as by DeepSpeed's scaler under ZeRO."""

    def __init__(self, fp16: FP16Section, scale: float) -> None:
        self.scale = scale
        self._fp16 = fp16
        self._overflows_left = fp16.hysteresis
        self._good_steps = 0

    def count(self, *, overflow: bool) -> None:
        """Move the scale after a step."""
        fp16 = self._fp16
        # A scale that the job sets is static.
        if fp16.loss_scale:
            return
        if overflow:
            self._good_steps = 0
            if self._overflows_left <= 1:
                self.scale = max(self.scale / 2, fp16.min_loss_scale)
            else:
                self._overflows_left -= 1
            return
        # This step is not counted yet: the scale grows with the first good step after a window.
        grows = self._good_steps > 0 and self._good_steps % fp16.loss_scale_window == 0
        self.scale *= 2 if grows else 1
        if grows or fp16.consecutive_hysteresis:
            self._overflows_left = fp16.hysteresis
        self._good_steps += 1


class Optimizer:
    """The user's optimiser and clipping, on the whole model's tree.

    Parameters that a load moves are not the optimiser's: they move by a rate, against the signs of
    their gradients. The transformation keeps no average, which `average` computes.
    """

    def __init__(
        self,
        transformation: optax.GradientTransformation,
        config: TrainConfig,
        trainable: Any,
        trace: ModelTrace,
    ) -> None:
        transformation = for_matrices(transformation, trace)
        self._load_biases = trace.load_biases
        self._transformation = transformation
        self._limit = config.gradient_clipping
        self._ema = config.ema
        self._trainable = trainable
        self._rate = config.pipeline.router_bias_update_rate
        self._update = jax.jit(transformation.update)

    def trained(self, params: PyTree) -> PyTree:
        """Return the parameters that are trained."""
        flat = flatten_dict(params)
        return unflatten_dict(
            {path: x for path, x in flat.items() if _is_trained(self._trainable, path)}
        )

    def init(self, params: PyTree) -> PyTree:
        """Make the optimiser's state."""
        return self._transformation.init(self._without_biases(self.trained(params)))

    def update(self, params: PyTree, opt_state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        """Apply one update; returns the new parameters and the optimiser's new state."""
        # Frozen parameters count neither in the norm nor in the optimiser's state.
        trained = self.trained(params)
        grads = self.trained(grads)
        if self._limit:
            squares = sum(float(np.sum(np.abs(g) ** 2)) for g in jax.tree.leaves(grads))
            factor = min(1.0, self._limit / (np.sqrt(squares) + _EPSILON))
            grads = jax.tree.map(lambda g: g * factor, grads)
        grads = jax.tree.map(lambda g, x: np.asarray(g, x.dtype), grads, trained)
        biases, signs = (flatten_dict(tree) for tree in (trained, grads))
        moved = {
            path: x - (self._rate * np.sign(signs[path])).astype(x.dtype)
            for path, x in biases.items()
            if path in self._load_biases
        }
        trained = self._without_biases(trained)
        grads = self._without_biases(grads)
        updates, opt_state = self._update(grads, opt_state, trained)
        new = jax.device_get(optax.apply_updates(trained, updates))
        return unflatten_dict(flatten_dict(params) | flatten_dict(new) | moved), opt_state

    def _without_biases(self, params: PyTree) -> PyTree:
        flat = flatten_dict(params)
        return unflatten_dict(
            {path: x for path, x in flat.items() if path not in self._load_biases}
        )

    def average(self, history: Sequence[PyTree]) -> PyTree:
        """Return the average of the trained parameters, of which `history` has all values."""
        assert self._ema is not None
        average, *others = map(self.trained, history)
        for count, params in enumerate(others, 1):
            decay = self._ema.decay
            if self._ema.warmup:
                # As documented for `ema`: the first parameters are soon forgotten.
                decay = min(decay, (1 + count) / (10 + count))
            average = jax.tree.map(
                lambda old, new, decay=decay: (
                    decay * np.asarray(old, _wide(old)) + (1 - decay) * new
                ),
                average,
                params,
            )
        return average


def _is_trained(trainable: Any, path: tuple[str, ...]) -> bool:
    """Whether a parameter is trained, by a pattern, patterns, a predicate or a tree of booleans."""
    name = "/".join(path)
    if trainable is None or callable(trainable):
        return trainable is None or bool(trainable(name))
    if isinstance(trainable, Mapping):
        of_below = trainable[path[0]]
        return _is_trained(of_below, path[1:]) if isinstance(of_below, Mapping) else bool(of_below)
    patterns = [trainable] if isinstance(trainable, str) else trainable
    return any(re.search(pattern, name) for pattern in patterns)


def cut_samples(tree: PyTree, size: int, part: slice) -> PyTree:
    """Cut the leaves of a tree that have `size` samples as their first dim."""
    return jax.tree.map(lambda x: x[part] if np.ndim(x) and len(x) == size else x, tree)


def _shaken(params: PyTree, shake: Shake | None) -> tuple[PyTree, Shaking | None]:
    """Shake parameters, and return how layers are shaken."""
    if shake is None:
        return params, None
    shaking = Shaking(jax.random.key(shake.seed), shake.least)
    # Between steps parameters are in their own dtype.
    return jax.device_get(_shaken_once(params, Shaking(shaking.key))), shaking


_shaken_once = jax.jit(shaken)


def _mean(values: Any) -> Any:
    first = values[0]
    if not jnp.issubdtype(np.asarray(first).dtype, jnp.inexact):
        return first
    return np.mean(np.asarray(values, _wide(first)), axis=0).astype(first.dtype)


def _wide(x: Any) -> Any:
    return np.complex128 if np.iscomplexobj(x) else np.float64
