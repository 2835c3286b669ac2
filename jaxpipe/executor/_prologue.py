"""The prologue: what only some virtual stages have before the trunk, under one switch on the virtual stage."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.autodiff import Residuals, SplitBackward, differentiable, split_backward
from jaxpipe.state import ModelParams, StageCut, Storage, switch_table

from ._batch import Context
from ._blueprint import Blueprint
from ._buffers import select
from ._packing import Packing
from ._reported import ReportedValues
from ._virtual_stage import VirtualStage


@dataclass(frozen=True)
class _Program:
    """One branch of the switch.

    Attributes:
        index: Its place among the branches.
        virtual_stage: The virtual stage that it was built for; others whose prologues are alike share it.
        stage: The stage of that.
        layers: Its layers.
        names: Their parameters.
        run: Their forward.
        residuals: The same with its backward.
        split: The same with a split backward, where the schedule asks for it.
    """

    index: int
    virtual_stage: int
    stage: int
    layers: range
    names: tuple[str, ...]
    run: Callable[..., tuple[PyTree, Any]]
    residuals: Residuals
    split: SplitBackward | None


class Prologue:
    """Forward and backward of each virtual stage's prologue, from what arrives there to the trunk's input.

    At the first one what arrives is the model's inputs, or what vocabulary-parallel layers before it hand over. Virtual
    stages whose prologues are alike share one branch; where none has a prologue there is no switch.

    Args:
        blueprint: The model, cut.
        arriving: Common form of what virtual stages hand over; member v is the output of virtual stage v. One member
            more is the input of the first, where that has a gradient.
        leaving: Common form of the prologues' outputs; member v belongs to virtual stage v.
        split: Make the split backward too.

    Attributes:
        aux: What the prologue of each virtual stage reports.
        num_reported: Length of the vector of values reported.
    """

    def __init__(self, blueprint: Blueprint, arriving: Packing, leaving: Packing, *, split: bool) -> None:
        self._params, self._collections = blueprint.params, blueprint.collections
        self._arriving, self._leaving, self._is_split = arriving, leaving, split
        cuts, trace = blueprint.cuts, blueprint.trace
        self._gradients = Packing([differentiable(struct) for struct in arriving.structs])
        # The first virtual stage's input has a gradient only where vocabulary-parallel layers come before it.
        self._before_first = len(cuts) if len(arriving.structs) > len(cuts) else None
        self._programs: list[_Program] = []
        self._program_of: list[int] = []
        self._starts = tuple(cut.prologue.start for cut in cuts)
        self.aux = [ReportedValues(blueprint.module.layers, trace, cut.prologue) for cut in cuts]
        self.num_reported = max(len(aux.names) for aux in self.aux)
        known: dict[Any, int] = {}
        for v, cut in enumerate(cuts):
            key = self._sharing_key(blueprint, cut, v)
            if key not in known:
                known[key] = len(self._programs)
                self._programs.append(self._build(blueprint, cut, v))
            self._program_of.append(known[key])
        # The branches of a switch must return one type: residuals are padded to the largest of each dtype.
        self._residuals = Packing([program.residuals.structs for program in self._programs])
        self._pending = Packing([program.split.pending if program.split else [] for program in self._programs])
        self._outgoing = Packing([differentiable(leaving.struct_of(v)) for v in range(len(cuts))])
        inputs = Packing([trace.boundaries[self._starts[0]], *(arriving.struct_of(v) for v in range(len(cuts)))])
        self._is_empty = len(cuts) > 1 and inputs.is_identity and not any(cut.prologue for cut in cuts)

    @property
    def has_params(self) -> bool:
        """True if any virtual stage has parameters before the trunk."""
        return any(program.names for program in self._programs)

    @property
    def residuals(self) -> PyTree:
        """Shapes and dtypes of what `forward` leaves for `backward`, in common form."""
        return self._residuals.struct

    @property
    def pending(self) -> PyTree:
        """Shapes and dtypes of what a split backward leaves for its weight gradient, in common form."""
        return self._pending.struct

    def forward(
        self, at: VirtualStage, storage: PyTree, collections: PyTree, inputs: PyTree, arrived: PyTree, context: Context
    ) -> tuple[PyTree, PyTree, PyTree, jax.Array]:
        """Forward in training, as `Stage.forward`: the trunk's input and the residuals are in common form."""
        if self._is_empty:
            x = self._entering(at, inputs, arrived)
            return x, self._residuals.zeros(), collections, jnp.zeros((0,), jnp.float32)

        def run(program: _Program) -> tuple:
            x = inputs if program.virtual_stage == 0 else self._arriving.unpack(program.virtual_stage - 1, arrived)
            given = self._context(program, at, collections, context)
            (out, *_), (new, values), residuals = program.residuals.forward(self._take(program, storage), x, given)
            # Inside the branch: only it knows which of the stage's collections are its own.
            updated = self._collections.put(program.stage, program.layers, collections, new)
            out = self._leaving.pack(program.virtual_stage, out)
            return out, self._residuals.pack(program.index, residuals), updated, values

        return self._switch(at, run)

    def backward(
        self,
        at: VirtualStage,
        storage: PyTree,
        residuals: PyTree,
        gradient: PyTree,
        reported_cotangent: jax.Array,
        *,
        split: bool,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Backward, as `Stage.backward`.

        Returns:
            `(gradients of parameters off the trunk, gradient of what arrived, what backward_weight needs)`, in
            common form.
        """
        if self._is_empty:
            return off_trunk_gradient(self._params, 0, {}), gradient, self._pending.zeros()

        def run(program: _Program) -> tuple[PyTree, PyTree, PyTree]:
            dy = self._outgoing.unpack(program.virtual_stage, gradient)
            cotangents = [*dy, *([reported_cotangent] if self.aux[program.virtual_stage].has_losses else [])]
            params, unpacked = self._take(program, storage), self._residuals.unpack(program.index, residuals)
            if split and program.split is not None:
                grads, dx, pending = program.split.backward_input(params, unpacked, cotangents)
                left = self._pending.pack(program.index, pending)
            else:
                grads, dx = program.residuals.backward(params, unpacked, cotangents)
                left = self._pending.zeros()
            return off_trunk_gradient(self._params, program.stage, _given(grads)), self._leave(program, dx), left

        return self._switch(at, run)

    def backward_weight(self, at: VirtualStage, storage: PyTree, residuals: PyTree, pending: PyTree) -> PyTree:
        """Gradients that a split backward has left, in common form, zero where it gave them."""
        if self._is_empty:
            return off_trunk_gradient(self._params, 0, {})

        def run(program: _Program) -> PyTree:
            assert program.split is not None
            unpacked = self._residuals.unpack(program.index, residuals)
            left = self._pending.unpack(program.index, pending)
            grads = program.split.backward_weight(self._take(program, storage), unpacked, left)
            return off_trunk_gradient(self._params, program.stage, _given(grads))

        return self._switch(at, run)

    def evaluate(
        self, at: VirtualStage, storage: PyTree, collections: PyTree, inputs: PyTree, arrived: PyTree, context: Context
    ) -> PyTree:
        """Forward outside training."""
        if self._is_empty:
            return self._entering(at, inputs, arrived)

        def run(program: _Program) -> PyTree:
            x = inputs if program.virtual_stage == 0 else self._arriving.unpack(program.virtual_stage - 1, arrived)
            given = self._context(program, at, collections, context)
            out, _ = program.run(self._take(program, storage), x, given, train=False)
            return self._leaving.pack(program.virtual_stage, out)

        return self._switch(at, run)

    def _entering(self, at: VirtualStage, inputs: PyTree, arrived: PyTree) -> PyTree:
        return select(at.is_at(0), inputs, arrived) if 0 in at.candidates else arrived

    def _switch(self, at: VirtualStage, run: Callable[[_Program], Any]) -> Any:
        """Run the program of a virtual stage, of those that it can be."""
        wanted = {self._program_of[v] for v in at.candidates}
        # A virtual stage that this chunk never is gets any branch: its entry is not looked up.
        table = [i if i in wanted else min(wanted) for i in self._program_of]
        return switch_table(at.index, table, [functools.partial(run, program) for program in self._programs])

    def _leave(self, program: _Program, dx: list[jax.Array]) -> PyTree:
        member = program.virtual_stage - 1 if program.virtual_stage else self._before_first
        return self._gradients.zeros() if member is None else self._gradients.pack(member, dx)

    def _take(self, program: _Program, storage: PyTree) -> dict[str, jax.Array]:
        return {name: self._params.layout.get(program.stage, name, storage) for name in program.names}

    def _context(self, program: _Program, at: VirtualStage, collections: PyTree, context: Context) -> tuple[Any, ...]:
        offset = jnp.asarray(self._starts, jnp.int32)[at.index] - program.layers.start
        return (offset, *context, self._collections.views(program.stage, program.layers, collections))

    def _build(self, blueprint: Blueprint, cut: StageCut, virtual_stage: int) -> _Program:
        s = blueprint.placement.locations[virtual_stage][0]
        stage = self._params.stages[s]

        def run(leaves: dict[str, jax.Array], inputs: PyTree, context: tuple, *, train: bool) -> tuple[PyTree, Any]:
            offset, key, side, collections = context
            views = [stage.view(i, leaves) for i in cut.prologue]
            return blueprint.module.run_layers(cut.prologue, views, train=train, offset=offset)(
                inputs, key, side, collections
            )

        def in_training(leaves: dict[str, jax.Array], inputs: PyTree, context: tuple) -> tuple[PyTree, PyTree]:
            y, extras = run(leaves, inputs, context, train=True)
            aux = self.aux[virtual_stage]
            loss, values = aux.collect([reported for _, reported in extras], self.num_reported)
            return (y, loss) if aux.has_losses else (y,), ([new for new, _ in extras], values)

        names = tuple(stage.names_of(cut.prologue))
        struct = {name: self._params.layout.struct_of(s, name) for name in names}
        offset = jax.ShapeDtypeStruct((), jnp.int32)
        context = (offset, *blueprint.context, [blueprint.trace.collections[i] for i in cut.prologue])
        residuals = Residuals(in_training, struct, blueprint.trace.boundaries[cut.prologue.start], context)
        label = ", ".join(blueprint.module.layers[i].name for i in cut.prologue)
        split = split_backward(residuals, struct, label) if self._is_split else None
        return _Program(len(self._programs), virtual_stage, s, cut.prologue, names, run, residuals, split)

    def _sharing_key(self, blueprint: Blueprint, cut: StageCut, virtual_stage: int) -> Any:
        """Equal for virtual stages that one branch can serve: equal layers, with parameters in the same slots."""
        layers = [blueprint.module.layers[i] for i in cut.prologue]
        # The first takes the model's inputs instead of an activation, and a tied layer's parameters have names of their
        # own on each stage: neither can share another's branch.
        if virtual_stage == 0 or any(named.tied_key is not None for named in layers):
            return ("virtual stage", virtual_stage)
        s = blueprint.placement.locations[virtual_stage][0]
        names = self._params.stages[s].names_of(cut.prologue)
        slots = tuple(self._params.layout.slot(s, name) for name in names)
        collections = self._collections.slots(s, cut.prologue)
        shapes = self._arriving.describe(virtual_stage - 1), self._leaving.describe(virtual_stage)
        return tuple(blueprint.signatures[i] for i in cut.prologue), slots, collections, shapes


def _given(grads: Mapping[str, jax.Array | None]) -> dict[str, jax.Array]:
    return {name: grad for name, grad in grads.items() if grad is not None}


def off_trunk_gradient(params: ModelParams, stage: int, grads: Mapping[str, jax.Array]) -> Storage:
    """Gradients of a stage's parameters off the trunk in the form they are summed in; what is not given is zero."""
    layout = params.grad_layout
    # Fresh zeros instead of the running sums: what is carried through a branch is copied in full in every tick.
    common = {
        name: grads[name].astype(like.dtype) if name in grads else jnp.zeros(like.shape, like.dtype)
        for name, like in layout.stacked.items()
        if name in params.stacked_off_trunk
    }
    return Storage(layout.pack_buffers(stage, grads), common)
