"""The prologue: the layers before the trunk, which differ between virtual stages.

They run in one switch on the virtual stage.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import Storage, switch_table
from jaxpipe.programs.autodiff import differentiable

from ._arrays import Packed, Pending, Residuals
from ._batch import Context
from ._blueprint import Blueprint
from ._buffers import select
from ._packing import Packing
from ._results import BackwardResult, ForwardResult
from ._segment_program import SegmentProgram
from ._virtual_stage import VirtualStage


class Prologue:
    """Forward and backward of each virtual stage's prologue, which ends at the trunk's input.

    The first virtual stage takes the model's inputs, or the outputs of the vocabulary-parallel
    layers before it. Virtual stages with equal prologues share one branch. If no virtual stage has
    a prologue, there is no switch.

    `arriving` is the common form of the outputs of virtual stages. `leaving` is the common form of
    the prologues' outputs, or `arriving` if there is no trunk. Member v belongs to virtual stage v.
    `gradients` are the members of the common form of gradients: one for the output of each virtual
    stage, and one more for the input of the first, if it has a gradient.

    Attributes:
        residuals: Shapes and dtypes of the residuals from `forward` to `backward`, in common form.
        pending: Shapes and dtypes of the values that a split backward keeps for the weight
            gradient, in common form.
        has_params: Whether any virtual stage has parameters before the trunk.
        has_deferred: Whether a split backward leaves any gradients to `backward_weight`.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        arriving: Packing,
        leaving: Packing,
        gradients: Sequence[PyTree],
        *,
        split: bool,
    ) -> None:
        self._blueprint = blueprint
        self._arriving = arriving
        self._leaving = leaving
        cuts = blueprint.cuts
        boundaries = blueprint.trace.boundaries
        # The first virtual stage's input has a gradient only if vocabulary-parallel layers precede
        # it.
        self._before_first = len(cuts) if len(gradients) > len(cuts) else None
        each = [
            SegmentProgram(blueprint, v, [cut.prologue for cut in cuts], split=split)
            for v in range(len(cuts))
        ]
        self.aux = [program.aux for program in each]
        self.num_reported = each[0].num_reported
        self._programs: list[SegmentProgram] = []
        self._program_of: list[int] = []
        known: dict[Any, int] = {}
        for program in each:
            key = self._sharing_key(program)
            if key not in known:
                known[key] = len(self._programs)
                self._programs.append(program)
            self._program_of.append(known[key])
            self._programs[known[key]].serve(program.virtual_stage, program.segment.layers)
        self.has_params = any(program.segment.names for program in self._programs)
        self.has_deferred = any(
            program.split and program.split.deferred for program in self._programs
        )
        self._has_immediate = any(
            program.split and program.split.immediate for program in self._programs
        )
        # All branches of a switch must return the same type, so residuals are padded to the largest
        # size of each dtype.
        self._residuals = Packing([program.residuals.structs for program in self._programs])
        self._pending = Packing([program.pending for program in self._programs])
        self.residuals = self._residuals.struct
        self.pending = self._pending.struct
        self._gradients = self._outgoing = Packing(gradients)
        if leaving is not arriving:
            self._outgoing = Packing([differentiable(struct) for struct in leaving.structs])
        inputs = Packing([boundaries[cuts[0].prologue.start], *arriving.structs])
        self._is_empty = (
            len(cuts) > 1 and inputs.is_identity and not any(cut.prologue for cut in cuts)
        )

    def forward(
        self,
        at: VirtualStage,
        storage: Storage,
        collections: Storage,
        inputs: PyTree,
        arrived: Packed,
        context: Context,
    ) -> ForwardResult:
        """Run the forward in training. The trunk's input and residuals are in common form."""
        if self._is_empty:
            x = self._arrived_or_inputs(at, inputs, arrived)
            return ForwardResult(
                x, self._residuals.zeros(), collections, jnp.zeros((0,), jnp.float32)
            )

        def run(number: int, program: SegmentProgram) -> ForwardResult:
            x = self._unpacked(program, inputs, arrived)
            full_context = (program.offset(at), *context, program.segment.collections(collections))
            result = program.forward(program.segment.take(storage), x, full_context)
            # Done inside the branch, which knows the collections of its own layers.
            updated = program.segment.put(collections, result.collections)
            y = self._leaving.pack(program.virtual_stage, result.output)
            residuals = self._residuals.pack(number, result.residuals)
            return ForwardResult(y, residuals, updated, result.reported)

        return self._switch(at, run)

    def backward(
        self,
        at: VirtualStage,
        storage: Storage,
        residuals: Residuals,
        gradient: Packed,
        reported_cotangent: jax.Array,
        *,
        split: bool,
    ) -> BackwardResult:
        """Run the backward, with `split` without gradients that can wait, in common form."""
        gives = self._has_immediate or not split
        if self._is_empty:
            off_trunk = self._programs[0].segment.off_trunk({}) if gives else None
            return BackwardResult(off_trunk, gradient, self._pending.zeros())

        def run(number: int, program: SegmentProgram) -> BackwardResult:
            v = program.virtual_stage
            dy = self._outgoing.unpack(program.virtual_stage, gradient)
            params = program.segment.take(storage)
            unpacked = self._residuals.unpack(number, residuals)
            result = program.backward(params, unpacked, dy, reported_cotangent, split=split)
            pending = self._pending.pack(number, result.pending) if split else self._pending.zeros()
            off_trunk = program.segment.off_trunk(result.grads) if gives else None
            member = v - 1 if v else self._before_first
            if member is None:
                return BackwardResult(off_trunk, self._gradients.zeros(), pending)
            return BackwardResult(
                off_trunk, self._gradients.pack(member, result.input_grad), pending
            )

        return self._switch(at, run)

    def backward_weight(
        self, at: VirtualStage, storage: Storage, residuals: Residuals, pending: Pending
    ) -> PyTree:
        """Compute the gradients that a split backward left, in common form; the others are zero."""

        def run(number: int, program: SegmentProgram) -> PyTree:
            unpacked = self._residuals.unpack(number, residuals)
            left = self._pending.unpack(number, pending)
            return program.segment.off_trunk(
                program.backward_weight(program.segment.take(storage), unpacked, left)
            )

        return self._switch(at, run)

    def evaluate(
        self,
        at: VirtualStage,
        storage: Storage,
        collections: Storage,
        inputs: PyTree,
        arrived: Packed,
        context: Context,
    ) -> PyTree:
        """Run the forward outside training."""
        if self._is_empty:
            return self._arrived_or_inputs(at, inputs, arrived)

        def run(_: int, program: SegmentProgram) -> PyTree:
            x = self._unpacked(program, inputs, arrived)
            full_context = (program.offset(at), *context, program.segment.collections(collections))
            y = program.run(program.segment.take(storage), x, full_context, train=False)[0]
            return self._leaving.pack(program.virtual_stage, y)

        return self._switch(at, run)

    def _arrived_or_inputs(self, at: VirtualStage, inputs: PyTree, arrived: Packed) -> PyTree:
        return select(at.is_at(0), inputs, arrived) if 0 in at.candidates else arrived

    def _unpacked(self, program: SegmentProgram, inputs: PyTree, arrived: Packed) -> PyTree:
        v = program.virtual_stage
        return self._arriving.unpack(v - 1, arrived) if v else inputs

    def _switch(self, at: VirtualStage, run: Callable[[int, SegmentProgram], Any]) -> Any:
        """Run the program of a virtual stage, which is one of its candidates."""
        wanted = {self._program_of[v] for v in at.candidates}
        # Virtual stages that this chunk can never be get any branch: their entries are not read.
        table = [i if i in wanted else min(wanted) for i in self._program_of]
        return switch_table(
            at.index, table, [functools.partial(run, *each) for each in enumerate(self._programs)]
        )

    def _sharing_key(self, program: SegmentProgram) -> Any:
        """Return a value that is equal for equal layers with parameters in the same slots."""
        v = program.virtual_stage
        segment = program.segment
        stage = segment.stage
        layers = segment.layers
        blueprint = self._blueprint
        # The first virtual stage takes the model's inputs instead of an activation, and a tied
        # layer's parameters have different names on each stage. Neither can share a branch.
        if v == 0 or any(blueprint.module.layers[i].tied_key is not None for i in layers):
            return ("virtual stage", v)
        slots = tuple(blueprint.params.layout.slot(stage, name) for name in segment.names)
        collections = blueprint.collections.slots(stage, layers)
        shapes = self._arriving.describe(v - 1), self._leaving.describe(v)
        return tuple(blueprint.signatures[i] for i in layers), slots, collections, shapes
