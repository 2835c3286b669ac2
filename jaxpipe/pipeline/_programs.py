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

from jaxpipe._typing import PyTree
from jaxpipe.executor import (
    DevicePrograms,
    EvaluationMetrics,
    GradientMetrics,
    Metrics,
    PartialMetrics,
    SampleTerms,
    UpdateMetrics,
)
from jaxpipe.state import Storage, TrainState, select_arrays

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
        evaluate_samples: `evaluate_samples(state, batch) -> terms`, the terms that each microbatch
            of each replica, and each single sample, add to the sums over a dataset in which some
            samples may not count.
        measured: `measured(measure)` is a program `(state, batch) -> arrays` that evaluates a
            function of each microbatch's outputs and labels on the devices that have the outputs.
            It returns leaves `[num_microbatches, microbatch_size * replicas, ...]` on every device.
            If logits are split over the stages, the function's outputs are a
            `jaxpipe.losses.SplitLogits`. The program is cached by the function.
        loss_metrics: Names of the metrics that `loss_fn` returns.
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
    evaluate_samples: Compiled[[TrainState, BatchLike], SampleTerms]
    measured: Callable[[Measure], Compiled[[TrainState, BatchLike], PyTree]]
    loss_metrics: tuple[str, ...]


def make_programs(
    device: DevicePrograms,
    mesh: Mesh,
    states: StateIO,
    batches: BatchIO,
    tracing: Callable[[], AbstractContextManager[object]],
) -> Programs:
    """Compile the functions of each device for a mesh; each is traced in `tracing()`."""
    rows = device.sharding.row_spec
    specs = states.specs
    of_state = jax.tree.map(lambda x: x.sharding, states.struct)
    everywhere = NamedSharding(mesh, P())
    of_trained = select_arrays(device.sharding.trained.shards, of_state.params)

    def compiled(
        name: str,
        function: Callable[..., Any],
        out_specs: Any,
        out_shardings: Any,
        donate: tuple[int, ...] = (),
        others: tuple[Any, ...] = (),
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
            donate_argnums=donate,
        )

    @functools.cache
    def measured(measure: Measure) -> Any:
        function = functools.partial(device.measured, measure)
        return compiled("measure", function, OVER_DATA, everywhere)

    of_gradients = (P(), rows, P("stage")), (everywhere, of_trained, of_state.collections)
    of_outputs = batches.samples_sharding
    return Programs(
        # Donated, so that memory need not hold the old and the new state together. Gradients and
        # evaluations return no new state and do not donate.
        step=compiled("train_step", device.step, (specs, P()), (of_state, everywhere), donate=(0,)),
        gradients=compiled("gradients", device.gradients, *of_gradients),
        partial_gradients=compiled(
            "partial_gradients",
            device.partial_gradients,
            *of_gradients,
            others=(everywhere, everywhere),
        ),
        # It takes no batch, so nothing is checked. The gradients come from `gradients` and have the
        # state's structure.
        update=Compiled(
            "update",
            device.update,
            mesh,
            ((specs, rows), (specs, P())),
            out_shardings=(of_state, everywhere),
            donate_argnums=0,
        ),
        evaluate=compiled("evaluate", device.evaluate, P(), everywhere),
        predict=compiled("predict", device.predict, OVER_DATA, of_outputs),
        evaluate_and_predict=compiled(
            "evaluate_and_predict",
            device.evaluate_and_predict,
            (P(), OVER_DATA),
            (everywhere, of_outputs),
        ),
        evaluate_samples=measured(device.measure_samples),
        measured=measured,
        loss_metrics=device.objective.metric_names,
    )
