"""The programs of each device inside `shard_map`: training step, gradients, update, evaluation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.core.state import (
    Storage,
    TrainState,
    Updater,
    ZeroSharding,
    broadcast_tied,
    clip_to,
    global_norm,
    layer_norms,
    mean_over_replicas,
    select_arrays,
    sum_tied,
    switch_stages,
)
from jaxpipe.data import Batch
from jaxpipe.distributed.topology import broadcast_sum, sum_over
from jaxpipe.layers import as_arrays
from jaxpipe.optim import LossScaler

from ._batch import DeviceBatch
from ._buffers import select
from ._evaluate import EvaluateLoop, Measure
from ._loss import Objective, gather_values, loss_divisor
from ._metrics import GradientMetrics, Metrics, PartialMetrics, UpdateMetrics
from ._stage import Stage, Weights
from ._tick_loop import Device, LossCotangents
from ._train import TrainLoop


class DevicePrograms:
    """The functions of one device, inside `shard_map`.

    States and batches are passed with their rows, the first dim of each array, which these
    functions drop.
    """

    def __init__(
        self,
        stage: Stage,
        sharding: ZeroSharding,
        updater: Updater,
        train: TrainLoop,
        evaluate: EvaluateLoop,
        objective: Objective,
        config: TrainConfig,
        shard_dims: Batch,
    ) -> None:
        self.stage = stage
        self.sharding = sharding
        self.updater = updater
        self._train = train
        self._evaluate = evaluate
        self.objective = objective
        self._scaler = LossScaler.from_config(config)
        self._checks_norm = config.on_nonfinite != "ignore"
        self._limit = config.gradient_clipping
        self._norms_by_layer = config.gradient_norms_by_layer
        self._tied = stage.params.tied
        self._shard_dims = shard_dims
        self._whole: Callable[[PyTree], PyTree] = (
            stage.vocab_loss.whole if stage.vocab_loss else lambda outputs: outputs
        )

    def init_optimizer(self, params: PyTree) -> PyTree:
        """Make the optimiser's state for new parameters."""
        return _expand(
            self.updater.init(
                self._shard_kind(),
                select_arrays(self.sharding.trained.shards, self._pinned(params)),
            )
        )

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Compute the gradients, then update the parameters."""
        metrics, grads, collections = self._gradients(state, batch)
        old = state.collections
        with jax.named_scope("update"):
            state, more = self._update(state, grads)
        new = collections_after(more, old, _expand(collections))
        return dataclasses.replace(state, collections=new), {**metrics, **more}

    def gradients(self, state: TrainState, batch: Batch) -> tuple[GradientMetrics, PyTree, PyTree]:
        """Compute metrics, mean gradients laid out like trained parameters, and collections."""
        partial, grads, collections = self._gradients(state, batch)
        # Same as in `update`: the norm of the scaled gradients, divided by the scale.
        norm = global_norm(self._tied, self.sharding, self._shard_kind(), grads)
        metrics: GradientMetrics = {**partial, "grad_norm": norm / self._loss_scale(state)}
        if self._norms_by_layer:
            metrics["grad_norms"] = self._layer_norms(state, grads)
        return metrics, _expand(self._unscale(state, grads)), _expand(collections)

    def partial_gradients(
        self, state: TrainState, batch: Batch, first: jax.Array | int, num_parts: jax.Array | int
    ) -> tuple[PartialMetrics, PyTree, PyTree]:
        """Compute the gradients of one of `num_parts` parts of a step, from microbatch `first`."""
        # Without their norm. The part's loss is the sum over the part, divided by `num_parts`.
        metrics, grads, collections = self._gradients(state, batch, first, num_parts)
        # 1 for a part of weight 0, whose gradients are 0 and remain 0.
        factor = loss_divisor(metrics["weight"])
        of_sum = jax.tree.map(
            lambda g: g * factor.astype(g.real.dtype), self._unscale(state, grads)
        )
        return metrics, _expand(self._keep_loads(of_sum, grads)), _expand(collections)

    def update(self, state: TrainState, grads: PyTree) -> tuple[TrainState, UpdateMetrics]:
        """Apply one update from gradients that `gradients` returned."""
        with jax.named_scope("update"):
            grads = self.sharding.trained.shards.constrain(_squeeze(grads))
            return self._update(state, self._scale(state, grads))

    def choose(self, choice: Callable[[PyTree, PyTree], PyTree], state: TrainState) -> PyTree:
        """Return parameters that replace the state's, in the same layout; see `Updater.choose`."""
        master = self._pinned(state.params)
        layout = self.sharding.trained.shards
        opt_state = self.updater.constrain(_squeeze(state.opt_state))
        params = select_arrays(layout, master)
        chosen = layout.constrain(
            self.updater.choose(choice, self._shard_kind(), params, opt_state)
        )
        return _expand(_merged(master, self._same_tied(chosen)))

    def restart_average(self, state: TrainState) -> PyTree:
        """Return the optimiser's state with the parameter average restarted."""
        params = select_arrays(self.sharding.trained.shards, self._pinned(state.params))
        opt_state = self.updater.constrain(_squeeze(state.opt_state))
        new = self.updater.restart_average(self._shard_kind(), params, opt_state)
        return _expand(self.updater.constrain(new))

    def measured(self, measure: Measure, state: TrainState, batch: Batch) -> PyTree:
        """Measure outputs and labels of every microbatch, with the result on every stage."""
        # Unused, because nothing is differentiated.
        one = LossCotangents(jnp.float32(1), jnp.float32(1))
        device = self._device(state, self._batch(state, batch), one)
        # All stages but the last hold zeros.
        return broadcast_sum(self._evaluate.run(device, measure), "stage")

    def outputs(self, outputs: PyTree, labels: PyTree) -> PyTree:
        """Return whole outputs. A number becomes an array, with one entry for each replica."""
        del labels
        return jax.tree.map(jnp.atleast_1d, self._whole(outputs))

    def _pinned(self, rows: Storage) -> Storage:
        """Return this device's row of parameters, sharded over automatic axes as laid out."""
        # Needed for inputs too: the specs of `shard_map` name only manual axes, and inside XLA
        # picks the sharding over the automatic axes.
        return self.sharding.master.shards.constrain(_squeeze(rows))

    def _shard_kind(self) -> jax.Array:
        return self.sharding.master.shard_kind(
            jax.lax.axis_index("stage"), jax.lax.axis_index("data")
        )

    def _batch(self, state: TrainState, batch: Batch, first: jax.Array | int = 0) -> DeviceBatch:
        batch = as_arrays(batch)
        batch = batch._replace(inputs=self.stage.cast_inputs(batch.inputs))
        replica = jax.lax.axis_index("data")
        axes = self.stage.sample_axes
        return DeviceBatch(batch, self._shard_dims, state.rng, state.step, replica, first, axes)

    def _device(self, state: TrainState, batch: DeviceBatch, cotangents: LossCotangents) -> Device:
        stage = jax.lax.axis_index("stage")
        # Once a step, not in every tick: this is the all-gather with ZeRO-1, and the cast with
        # mixed precision.
        with jax.named_scope("gather"):
            storage = self.sharding.gather_params(
                stage, self._shard_kind(), self._pinned(state.params)
            )
            storage = self.stage.params.layout.constrain(storage)
        return Device(
            stage=stage,
            weights=Weights(storage, self.stage.trunk.prepare(storage.stacked)),
            collections=self.stage.collections.layout.constrain(_squeeze(state.collections)),
            batch=batch,
            cotangents=cotangents,
        )

    def _gradients(
        self,
        state: TrainState,
        batch: Batch,
        first: jax.Array | int = 0,
        num_parts: jax.Array | int = 1,
    ) -> tuple[PartialMetrics, PyTree, PyTree]:
        """Compute metrics, this row's gradients times the loss scale, and collections."""
        device_batch = self._batch(state, batch, first)
        weight = self.objective.divisor(device_batch.labels, self._train.program.num_microbatches)
        divisor = loss_divisor(weight)
        device = self._device(state, device_batch, self._cotangents(state, divisor, num_parts))
        sums = self._train.run(device, 1 + len(self.objective.metric_names))
        off_trunk = sums.off_trunk_grads.stacked
        # A parameter that vocabulary-parallel layers share with other layers is in both, and its
        # gradient is the sum.
        vocab = {
            name: g + off_trunk[name] if name in off_trunk else g
            for name, g in sums.vocab.grads.items()
        }
        grads = Storage(
            sums.off_trunk_grads.packed,
            {**off_trunk, **vocab, **self.stage.trunk.named(sums.trunk_grads)},
        )
        with jax.named_scope("reduce"):
            grads = self._without_frozen(device.stage, grads)
            # First summed over the stages: tied parameters need complete gradients before they are
            # cut into shards.
            grads = sum_tied(self._tied, self.stage.params.grad_layout, device.stage, grads)
            grads = self.sharding.reduce_gradients(device.stage, self._shard_kind(), grads)
            grads = self.sharding.trained.shards.constrain(grads)
        reported = gather_values(sums.all_reported, self.stage.aux_names, self.objective.num_terms)
        # The sums are zero on all stages but the last, so adding over the stages broadcasts them.
        loss, of_loss = self.objective.named(sum_over(sums.loss, ("stage", "data")) / divisor)
        metrics: PartialMetrics = {"loss": sum(reported["losses"].values(), loss), "weight": weight}
        if reported["losses"]:
            metrics["losses"] = reported["losses"]
        if reported["metrics"] or of_loss:
            metrics["metrics"] = {**reported["metrics"], **of_loss}
        return metrics, grads, mean_over_replicas(sums.collections)

    def _cotangents(
        self, state: TrainState, divisor: jax.Array, num_parts: jax.Array | int
    ) -> LossCotangents:
        """Compute the factors of the losses before differentiation."""
        # With these factors the losses of all microbatches and replicas add up to the loss of the
        # step times the loss scale. Each layer's backward therefore sees the cotangent that
        # `jax.grad` of that loss would pass to it, in every precision. A division after the
        # backward would be wrong for a backward that is not linear, such as one that clips or
        # rounds.
        # float16 cannot represent numbers below 6e-8, and most cotangents of a mean over a large
        # batch would be smaller. Without a scaler the scale is 1.
        scale = self._loss_scale(state)
        # A step with several calls differentiates one part per call, and its loss is the mean over
        # the parts.
        scale = scale / num_parts
        # Main losses are averaged by weight, reported losses over microbatches times replicas.
        return LossCotangents(main=scale / divisor, reported=scale / self.objective.num_terms)

    def _update(self, state: TrainState, grads: PyTree) -> tuple[TrainState, UpdateMetrics]:
        """Clip and apply gradients that are still multiplied by the loss scale."""
        shard_kind = self._shard_kind()
        layout = self.sharding.trained.shards
        master = self._pinned(state.params)
        opt_state = self.updater.constrain(_squeeze(state.opt_state))
        params = select_arrays(layout, master)
        scaled_norm = global_norm(self._tied, self.sharding, shard_kind, grads)
        scale = self._loss_scale(state)
        # The norm of the scaled gradients is computed and then divided, so it also detects an
        # overflow without a second pass.
        norm = scaled_norm / scale
        by_layer = self._layer_norms(state, grads) if self._norms_by_layer else {}
        clipped = clip_to(self._limit, norm, self._unscale(state, grads))
        grads = self._keep_loads(clipped, grads)
        new_params, new_opt = self.updater.update(shard_kind, params, grads, opt_state)
        new_params = layout.constrain(new_params)
        new_opt = self.updater.constrain(new_opt)
        new_params = self._same_tied(new_params)
        metrics: UpdateMetrics = {"grad_norm": norm}
        if self._norms_by_layer:
            metrics["grad_norms"] = by_layer
        changes: dict[str, Any] = {}
        overflow = ~jnp.isfinite(scaled_norm)
        if self._checks_norm:
            # A select instead of a branch: the update is elementwise, and a branch would copy all
            # parameters.
            new_params, new_opt = select(overflow, (params, opt_state), (new_params, new_opt))
            changes["skipped_steps"] = state.skipped_steps + overflow.astype(jnp.int32)
            metrics["overflow"] = overflow
        if self._scaler is not None:
            changes["loss_scale"] = self._scaler.update(state.loss_scale, overflow)
            metrics["loss_scale"] = scale
        new_params = _merged(master, new_params)
        # Skipped steps count too, as in DeepSpeed: dropout keys depend on the number of batches
        # seen.
        changes |= {
            "step": state.step + 1,
            "params": _expand(new_params),
            "opt_state": _expand(new_opt),
        }
        return dataclasses.replace(state, **changes), metrics

    def _layer_norms(self, state: TrainState, grads: PyTree) -> dict[str, jax.Array]:
        """Compute norms by layer, from gradients still multiplied by the loss scale."""
        paths = self.stage.params.trained_paths
        found = layer_norms(paths, self._tied, self.sharding, self._shard_kind(), grads)
        return {name: norm / self._loss_scale(state) for name, norm in found.items()}

    def _same_tied(self, trained: Storage) -> Storage:
        """Give all copies of tied parameters the values of one stage."""
        # Two programs may round equal sums differently.
        return broadcast_tied(self._tied, self.sharding.trained, self._shard_kind(), trained)

    def _without_frozen(self, stage: jax.Array, grads: Storage) -> Storage:
        """Zero the gradients of trunk parameters that this stage has frozen."""
        # Another stage trains the parameters in the same slots.
        zeroed = {
            name: jnp.where(jnp.asarray(is_frozen)[stage], 0, grads.stacked[name])
            for name, is_frozen in self.stage.params.partly_frozen.items()
        }
        return Storage(grads.packed, {**grads.stacked, **zeroed})

    def _keep_loads(self, changed: Storage, grads: Storage) -> Storage:
        """Restore the loads, which no factor may change, in a shard of changed gradients."""
        layout = self.sharding.trained.shards
        loads = self.stage.params.load_biases
        stacked = {n: g if n in loads else changed.stacked[n] for n, g in grads.stacked.items()}

        def keep(kind: int, *buffers: dict[str, jax.Array]) -> dict[str, jax.Array]:
            names = [n for n in layout.names(kind) if n in loads and n not in layout.stacked]
            into, given = map(Storage, buffers)
            return layout.put(kind, into, {n: layout.get(kind, n, given) for n in names}).packed

        kinds = range(layout.num_stages)
        packed = switch_stages(self._shard_kind(), kinds, keep, changed.packed, grads.packed)
        return Storage(packed, stacked)

    def _loss_scale(self, state: TrainState) -> jax.Array:
        return jnp.float32(1) if self._scaler is None else state.loss_scale.scale

    def _scale(self, state: TrainState, grads: PyTree) -> PyTree:
        return (
            grads
            if self._scaler is None
            else jax.tree.map(lambda g: g * self._loss_scale(state), grads)
        )

    def _unscale(self, state: TrainState, grads: PyTree) -> PyTree:
        return (
            grads
            if self._scaler is None
            else jax.tree.map(lambda g: g / self._loss_scale(state), grads)
        )


def collections_after(metrics: UpdateMetrics, old: PyTree, new: PyTree) -> PyTree:
    """Return the collections after an update; a skipped one leaves batch statistics unchanged."""
    return select(metrics["overflow"], old, new) if "overflow" in metrics else new


def _merged(master: Storage, trained: Storage) -> Storage:
    """Replace the trained parameters of a row."""
    return Storage({**master.packed, **trained.packed}, {**master.stacked, **trained.stacked})


def _squeeze(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], tree)


def _expand(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None], tree)
