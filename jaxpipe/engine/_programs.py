"""The compiled programs of an engine, one for each shape of its batches."""

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.core.pipeline import Pipeline, entry_struct
from jaxpipe.data import Batch, structures_differ
from jaxpipe.distributed import log
from jaxpipe.distributed.topology import num_batch_shards
from jaxpipe.errors import DataError, counted
from jaxpipe.layers import PipelineModule, flatten_dict, format_struct, struct_of
from jaxpipe.layers.recompute import settings_for
from jaxpipe.schedules.partition import profile_source

from ._hold import hold_signals

MAX_PROGRAMS = 8
"""Number of shapes whose programs are kept. Beyond it, the least recently used is dropped."""

MAX_TEXT_PROGRAMS = 64
"""The same for `generate`, which needs one for each length of a text, each without a backward."""

MANY_SHAPES = 4
"""Number of batch shapes at which a warning says that each one compiles a program."""

_PRECISION = "jax_default_matmul_precision"


@dataclass(frozen=True)
class _Form:
    """Properties shared by batches of all shapes: the model's boundaries and state structure."""

    boundaries: tuple[int, ...]
    cuts: Any
    params: Mapping[Path, jax.ShapeDtypeStruct]
    state: Any
    inputs: str


class ProgramCache:
    """Creates and caches pipelines that all share one state structure.

    There is one `Pipeline` for each batch shape and number of microbatches. A pipeline traces its
    layers once, so there is also one for each `jax.default_matmul_precision`.

    Attributes:
        module: The layers. Once the boundaries are known, they are included.
        latest: The pipeline of the last batch with labels, or of the last batch if none had labels.
    """

    def __init__(
        self,
        module: PipelineModule,
        optimizer: optax.GradientTransformation | None,
        mesh: Mesh,
        config: TrainConfig,
        replicas: range,
        planned_microbatches: Callable[[], int],
    ) -> None:
        self.module = module
        self._optimizer = optimizer
        self._mesh = mesh
        self._given = module, config
        self._config = config
        self._recompute = settings_for(config, mesh)
        # The replicas whose samples this process supplies.
        self._replicas = replicas
        self._num_replicas = num_batch_shards(mesh)
        self._microbatch_size = config.batch_sizes(
            self._num_replicas
        ).train_micro_batch_size_per_gpu
        # The number of microbatches of a training step. Schedule and boundaries are chosen for it,
        # whatever the first batch has.
        self._planned_microbatches = planned_microbatches
        self._programs: OrderedDict[Hashable, Pipeline] = OrderedDict()
        self._of_texts: OrderedDict[Hashable, Pipeline] = OrderedDict()
        self._shapes: list[str] = []
        """Shapes seen so far, until there are `MANY_SHAPES`."""
        self._form: _Form | None = None
        self._like: dict[str, PyTree] = {}
        self._latest_has_labels = False
        self.latest: Pipeline | None = None

    def __len__(self) -> int:
        return len(self._programs)

    def for_batch(self, batch: Batch, num_microbatches: int, **options: Any) -> Pipeline:
        """Return the pipeline for a batch `[num_microbatches, samples, ...]`; see `get`."""
        return self.get(_entry_of(batch), num_microbatches, **options)

    def get(
        self,
        entry: Sequence[PyTree],
        num_microbatches: int,
        *,
        has_labels: bool = True,
        is_whole: bool = False,
        is_text: bool = False,
        microbatch_size: int | None = None,
    ) -> Pipeline:
        """Return the pipeline for the shapes of an entry, created if the shapes are new.

        `entry` has arrays or shapes `[microbatch_size * replicas, ...]` for the replicas of this
        process, or for all with `is_whole`. Without `has_labels`, the labels are not meant for the
        model and often empty, and the pipeline only predicts. With `is_text`, it is one of many
        that `generate` needs, and does not replace others.
        """
        struct = self._whole(entry, is_whole, microbatch_size or self._microbatch_size)
        self._check_like(struct, has_labels)
        leaves, treedef = jax.tree.flatten(struct)
        key = (
            num_microbatches,
            has_labels,
            getattr(jax.config, _PRECISION),  # layers are traced with it
            treedef,
            tuple((x.shape, x.dtype) for x in leaves),
        )
        programs = self._of_texts if is_text else self._programs
        pipeline = programs.get(key)
        if pipeline is None:
            pipeline = self._make(struct, num_microbatches, has_labels)
            if not is_text:
                self._make_room(struct)
                self._warn_of_many(struct)
            elif len(programs) == MAX_TEXT_PROGRAMS:
                programs.popitem(last=False)
            programs[key] = pipeline
        programs.move_to_end(key)
        # After it was built, so that invalid shapes do not constrain later batches.
        self._like |= {
            name: part for name, part in struct._asdict().items() if name != "labels" or has_labels
        }
        # Parameters and state are read through `latest`, so it is a pipeline that can train once
        # there is one.
        if has_labels or not self._latest_has_labels:
            self.latest = pipeline
            self._latest_has_labels = has_labels
        return pipeline

    def _whole(self, entry: Sequence[PyTree], is_whole: bool, size: int) -> Batch:
        """Return the shapes for all replicas."""
        num_replicas = self._num_replicas
        if is_whole or len(self._replicas) == num_replicas:
            return entry_struct(entry, size, num_replicas)
        part = entry_struct(entry, size, len(self._replicas), "replicas of this process")
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((size * num_replicas, *x.shape[1:]), x.dtype), part
        )

    def forget(self) -> None:
        """Drop all programs and everything known about shapes, as before the first batch."""
        self._programs.clear()
        self._of_texts.clear()
        self._shapes = []
        self._form = None
        self._like = {}
        # The boundaries and the schedule too: those chosen for rejected shapes may not fit the next
        # ones.
        self.module, self._config = self._given
        self.latest = None
        self._latest_has_labels = False

    def clear(self) -> None:
        """Drop the programs of all shapes except the latest."""
        self._of_texts.clear()
        self._programs = OrderedDict(
            (key, each) for key, each in self._programs.items() if each is self.latest
        )

    def _make(self, struct: Batch, num_microbatches: int, has_labels: bool) -> Pipeline:
        planned = self._planned_microbatches()
        # The first choice is kept for all shapes, so it must be made for training, not for an
        # evaluation.
        if self._form is None and self._is_open and num_microbatches != planned:
            self._make(struct, planned, has_labels)
        # A pipeline cannot be built without a loss; this one is 0 for any outputs and never used.
        module = self.module if has_labels else self.module.replace(loss_fn=_no_loss)
        parts = None if self._form is None else self._form.boundaries
        config = self._config
        if not has_labels and config.pipeline.split_vocabulary == "auto":
            # It is not known yet whether the loss can be split, and a choice made here is final.
            config = dataclasses.replace(
                config, pipeline=dataclasses.replace(config.pipeline, split_vocabulary=False)
            )
        pipeline = Pipeline(
            module,
            self._optimizer,
            self._mesh,
            struct,
            num_microbatches,
            config,
            self._recompute,
            parts,
        )
        inputs = format_struct(struct.inputs)
        params = flatten_dict(pipeline.trace.tree())
        form = _Form(
            pipeline.plan.parts, pipeline.stage.cuts, params, pipeline.states.struct, inputs
        )
        if self._form is None:
            with hold_signals():
                self._form = form
                self._config = pipeline.plan.config
                self.module = self.module.with_cut(
                    pipeline.trace, pipeline.plan.parts, pipeline.plan.program.placement.stages
                )
        else:
            _check_form(form, self._form)
        return pipeline

    @property
    def _is_open(self) -> bool:
        """True if model costs determine the schedule, the boundaries or the vocabulary split."""
        section = self._config.pipeline
        is_profiled = profile_source(self.module.partition_method) is not None
        return self.module.num_stages > 1 and (
            is_profiled or "auto" in (section.schedule, section.split_vocabulary)
        )

    def _check_like(self, struct: Batch, has_labels: bool) -> None:
        """Compare the structure and dtypes with those of earlier batches."""
        for name, given in struct._asdict().items():
            like = self._like.get(name)
            if like is None or (name == "labels" and not has_labels):
                continue
            if jax.tree.structure(given) != jax.tree.structure(like):
                raise structures_differ(like, given, name, "this batch", "the batches before")
            for (path, x), before in zip(
                jax.tree.leaves_with_path(given), jax.tree.leaves(like), strict=True
            ):
                if x.dtype != before.dtype:
                    raise DataError(
                        f"{name}{jax.tree_util.keystr(path)} must have the dtype of the batches "
                        f"before, which had {format_struct(before)}, but got {format_struct(x)}. "
                        "Only shapes may change: convert it, or map entries with set_batch_fn."
                    )

    def _warn_of_many(self, struct: Batch) -> None:
        """Warn once that each new shape compiles a program, before that costs a run hours."""
        shape = _describe(struct._replace(labels=()))
        if len(self._shapes) >= MANY_SHAPES or shape in self._shapes:
            return
        self._shapes.append(shape)
        if len(self._shapes) == MANY_SHAPES:
            log(
                logging.WARNING,
                "batches have come in %d shapes, and each is a program of its own, which takes as "
                "long to compile as the first: %s. Pad all microbatches of a step to one of a few "
                "lengths.",
                MANY_SHAPES,
                "; ".join(self._shapes),
            )

    def _make_room(self, struct: Batch) -> None:
        """Drop the least recently used program if there are too many."""
        if len(self._programs) < MAX_PROGRAMS:
            return
        self._programs.popitem(last=False)
        log(
            logging.WARNING,
            "programs for %d shapes of batches are kept: the one least recently used is dropped "
            "for %s. Pad batches to fewer lengths.",
            MAX_PROGRAMS,
            _describe(struct),
        )


def describe_batch(batch: Batch) -> str:
    """Describe a batch with leaves `[num_microbatches, ...]` for a line about compiling."""
    count = jax.tree.leaves(batch)[0].shape[0]
    return f" for {counted(count, 'microbatch', 'es')} of {_describe(_entry_of(batch))}"


def _entry_of(batch: Batch) -> Batch:
    """Return the shapes of one microbatch of a batch."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), struct_of(batch))


def _describe(struct: Batch) -> str:
    named = struct._asdict().items()
    return ", ".join(
        f"{name} {format_struct(part)}" for name, part in named if jax.tree.leaves(part)
    )


def _no_loss(outputs: PyTree, labels: PyTree) -> jax.Array:
    """Return a zero loss, for a model without labels."""
    del outputs, labels
    return jnp.zeros((), jnp.float32)


def _check_form(new: _Form, first: _Form) -> None:
    """Raise DataError unless pipelines of both forms can use the same state."""
    repair = "Pad or cut the batches to one shape, or make these layers independent of it."
    for path in {**first.params, **new.params}:
        found = new.params.get(path)
        wanted = first.params.get(path)
        if (
            found is None
            or wanted is None
            or (found.shape, found.dtype) != (wanted.shape, wanted.dtype)
        ):
            name = "/".join(path)
            raise DataError(
                "the shapes of a batch must leave the parameters as they are, but got "
                f"inputs={new.inputs} with {name}={_shown(found)} where inputs={first.inputs} had "
                f"{name}={_shown(wanted)}. {repair}"
            )
    # Compare the cuts too: if signatures change with the shapes, layers move out of the trunk and
    # their parameters move into other arrays.
    if new.cuts != first.cuts or not _same(new.state, first.state):
        raise DataError(
            "the shapes of a batch must leave the form of the state as it is, but got "
            f"inputs={new.inputs} for which different layers have equal signatures, or keep "
            f"different collections, than for inputs={first.inputs}. {repair}"
        )


def _shown(struct: Any) -> str:
    return "none" if struct is None else format_struct(struct)


def _same(a: Any, b: Any) -> bool:
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)
