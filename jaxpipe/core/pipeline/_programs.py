"""The jitted functions of a pipeline."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree
from jaxpipe.core.executor import (
    DevicePrograms,
    EvaluationMetrics,
    GradientMetrics,
    Metrics,
    Objective,
    PartialMetrics,
    UpdateMetrics,
)
from jaxpipe.core.state import Storage, TrainState, select_arrays

from ._batch_io import OVER_DATA, BatchIO, BatchLike
from ._program import Compiled
from ._state_io import StateIO

Measure = Callable[[PyTree, PyTree], PyTree]


@dataclass(frozen=True)
class Programs:
    """The jitted functions of a pipeline; `Pipeline` explains its most used ones.

    Attributes:
        step: See `Pipeline`.
        gradients: See `Pipeline`.
        partial_gradients: `partial_gradients(state, batch, first, num_parts)` is `gradients`,
            without the norm, for one of `num_parts` parts of a step. The part begins with
            microbatch `first` of the step, which also determines its random keys. The gradients are
            those of the part's loss times its weight, divided by `num_parts`.
        update: See `Pipeline`.
        evaluate: See `Pipeline`.
        predict: `predict(state, batch) -> outputs`, with leaves
            `[num_microbatches, microbatch_size * replicas, ...]`, or `[num_microbatches, replicas]`
            for a number.
        evaluate_and_predict: Runs both in one program.
        measured: `measured(measure)` is a program `(state, batch) -> arrays` that evaluates a
            function of each microbatch's outputs and labels on the devices that have the outputs.
            It returns leaves `[num_microbatches, microbatch_size * replicas, ...]` on every device.
            If logits are split over the stages, the function's outputs are a
            `jaxpipe.losses.SplitLogits`. The program is cached by the function.
        objective: The loss of a batch. `measured(objective.measure_samples)` returns the terms that
            each microbatch of each replica, and each single sample, add to the sums over a dataset
            in which some samples may not count. `objective.metric_names` are the names of the
            metrics that `loss_fn` returns.
    """

    step: Compiled[[TrainState, BatchLike], tuple[TrainState, Metrics]]
    gradients: Compiled[[TrainState, BatchLike], tuple[GradientMetrics, Storage, Storage]]
    partial_gradients: Compiled[
        [TrainState, BatchLike, jax.Array, np.int32], tuple[PartialMetrics, Storage, Storage]
    ]
    update: Compiled[[TrainState, Storage], tuple[TrainState, UpdateMetrics]]
    evaluate: Compiled[[TrainState, BatchLike], EvaluationMetrics]
    predict: Compiled[[TrainState, BatchLike], PyTree]
    evaluate_and_predict: Compiled[[TrainState, BatchLike], tuple[EvaluationMetrics, PyTree]]
    measured: Callable[[Measure], Compiled[[TrainState, BatchLike], PyTree]]
    objective: Objective


def make_programs(
    device: DevicePrograms,
    mesh: Mesh,
    states: StateIO,
    batches: BatchIO,
    tracing: Callable[[], AbstractContextManager[object]],
) -> Programs:
    """Compile the functions of each device for a mesh; each is traced in `tracing()`."""
    specs = states.specs
    of_state = jax.tree.map(lambda x: x.sharding, states.struct)
    everywhere = NamedSharding(mesh, P())

    def compiled(
        name: str,
        function: Callable[..., Any],
        out_specs: Any,
        out_shardings: Any,
        others: tuple[Any, ...] = (),
        **options: Any,
    ) -> Any:
        # Outputs have the shardings of the inputs. Otherwise XLA may choose another sharding over
        # automatic axes.
        return Compiled(
            name,
            function,
            mesh,
            ((specs, batches.specs, *(other.spec for other in others)), out_specs),
            check_batch=batches.check,
            tracing=tracing,
            in_shardings=(of_state, batches.shardings, *others),
            out_shardings=out_shardings,
            **options,
        )

    def measured(name: str, measure: Measure, shardings: Any = everywhere, **options: Any) -> Any:
        function = functools.partial(device.measured, measure)
        return compiled(name, function, OVER_DATA, shardings, **options)

    objective = device.objective
    of_outputs = batches.samples_sharding
    of_trained = select_arrays(device.sharding.trained.shards, of_state.params)
    of_gradients = (
        (P(), device.sharding.row_spec, P("stage")),
        (everywhere, of_trained, of_state.collections),
    )
    part = everywhere, everywhere
    return Programs(
        # Donated, so that memory need not hold the old and the new state together. Gradients and
        # evaluations return no new state and do not donate.
        compiled("train_step", device.step, (specs, P()), (of_state, everywhere), donate_argnums=0),
        compiled("gradients", device.gradients, *of_gradients),
        compiled("partial_gradients", device.partial_gradients, *of_gradients, part),
        _update(device, mesh, states),
        measured("evaluate", objective.measure_replica, then=objective.means),
        measured("predict", device.outputs, of_outputs),
        measured(
            "evaluate_and_predict",
            lambda y, t: (objective.measure_replica(y, t), device.outputs(y, t)),
            (everywhere, of_outputs),
            then=lambda found: (objective.means(found[0]), found[1]),
        ),
        functools.cache(functools.partial(measured, "measure")),
        objective,
    )


def _update(device: DevicePrograms, mesh: Mesh, states: StateIO) -> Any:
    # It takes no batch, so nothing is checked. The gradients come from `gradients` and have the
    # state's structure.
    of_state = jax.tree.map(lambda x: x.sharding, states.struct)
    return Compiled(
        "update",
        device.update,
        mesh,
        ((states.specs, device.sharding.row_spec), (states.specs, P())),
        out_shardings=(of_state, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
