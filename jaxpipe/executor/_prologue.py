"""The prologue: what only some parts of the model have before the trunk, under one switch on the part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.autodiff import Residuals, SplitBackward, differentiable, split_backward
from jaxpipe.state import ModelParams, StageCut

from ._aux import AuxSlots
from ._blueprint import Blueprint
from ._buffers import select
from ._cell import Cell
from ._packing import Packing
from ._trunk import Context


@dataclass(frozen=True)
class _Program:
    """One branch of the switch: the part it was built for, that part's stage, and its forward and backward."""

    part: int
    stage: int
    layers: range
    names: tuple[str, ...]
    run: Callable[..., tuple[PyTree, Any]]
    residuals: Residuals
    split: SplitBackward | None


class Prologue:
    """Forward and backward of each part's prologue, from what arrives at the part to the trunk's input.

    At part 0 what arrives is the model's inputs, or what layers before it hand over. Parts whose prologues are alike
    share one branch; where no part has one there is no switch.

    Args:
        plan: The model, cut.
        arriving: Common form of what parts hand over; member p is the output of part p. One member more is the input
            of part 0, where that has a gradient.
        leaving: Common form of the prologues' outputs; member p belongs to part p.
        split: Make the halves of the backward too.

    Attributes:
        aux: What the prologue of each part reports.
        num_values: Length of the vector of values reported.
    """

    def __init__(self, plan: Blueprint, arriving: Packing, leaving: Packing, *, split: bool) -> None:
        self._params, self._collections = plan.params, plan.collections
        self._arriving, self._leaving = arriving, leaving
        self._placement, self._is_split = plan.placement, split
        parts = range(len(plan.cuts))
        self._gradients = Packing([differentiable(struct) for struct in arriving.structs])
        self._before_first = len(parts) if len(arriving.structs) > len(parts) else None
        self._programs: list[_Program] = []
        self._branch: list[int] = []
        self._starts = tuple(cut.prologue.start for cut in plan.cuts)
        self.aux = [AuxSlots(plan.module.layers, plan.trace, cut.prologue) for cut in plan.cuts]
        self.num_values = max(len(aux.names) for aux in self.aux)
        known: dict[Any, int] = {}
        for p, cut in enumerate(plan.cuts):
            key = self._sharing_key(plan, cut, p)
            if key not in known:
                known[key] = len(self._programs)
                self._programs.append(self._build(plan, cut, p))
            self._branch.append(known[key])
        self._kept = Packing([program.residuals.kept for program in self._programs])
        self._pending = Packing([program.split.pending if program.split else [] for program in self._programs])
        self._outgoing = Packing([differentiable(leaving.struct_of(p)) for p in parts])
        inputs = Packing([plan.trace.boundaries[self._starts[0]], *(arriving.struct_of(p) for p in parts)])
        self._is_empty = len(plan.cuts) > 1 and inputs.is_identity and not any(cut.prologue for cut in plan.cuts)

    @property
    def has_params(self) -> bool:
        """Whether any part has parameters before the trunk."""
        return any(program.names for program in self._programs)

    @property
    def kept(self) -> PyTree:
        """Shapes and dtypes of what `forward` returns beside the trunk's input."""
        return self._kept.struct

    @property
    def pending(self) -> PyTree:
        """Shapes and dtypes of what the input half of a backward leaves for the weight half."""
        return self._pending.struct

    def forward(
        self, at: Cell, storage: PyTree, collections: PyTree, first: PyTree, arrived: PyTree, context: Context
    ) -> tuple[PyTree, PyTree, PyTree, jax.Array]:
        """Compute the trunk's input.

        Args:
            at: The part.
            storage: The stage's parameters.
            collections: Its collections.
            first: What part 0 takes, such as the microbatch's inputs.
            arrived: What arrived from the part before, in common form.
            context: The microbatch's key and side inputs.

        Returns:
            `(trunk input, what backward needs, collections, values reported)`, the first two in common form.
        """
        if self._is_empty:
            return self._entering(at, first, arrived), self._kept.zeros(), collections, jnp.zeros((0,), jnp.float32)

        def branch(place: int) -> Callable[[], tuple]:
            program = self._programs[place]

            def run() -> tuple:
                x = first if program.part == 0 else self._arriving.unpack(program.part - 1, arrived)
                full = self._context(program, at, collections, context)
                (out, *_), (held, values), kept = program.residuals.forward(self._take(program, storage), x, full)
                new = self._collections.put(program.stage, program.layers, collections, held)
                return self._leaving.pack(program.part, out), self._kept.pack(place, kept), new, values

            return run

        return self._switch(at, branch)

    def backward(
        self, at: Cell, storage: PyTree, kept: PyTree, gradient: PyTree, aux_seed: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """Compute the gradients of the prologue.

        Args:
            at: The part.
            storage: The stage's parameters.
            kept: As `forward` returned it.
            gradient: Gradient of the trunk's input, in the common form of its differentiable leaves.
            aux_seed: Gradient of the losses that the layers report.

        Returns:
            `(gradients of the stage's own parameters, gradient of what arrived)`, in common form.
        """
        if self._is_empty:
            return own_gradient(self._params, 0, {}), gradient

        def branch(place: int) -> Callable[[], tuple[PyTree, PyTree]]:
            program = self._programs[place]

            def run() -> tuple[PyTree, PyTree]:
                dy, held = self._seeds(program, gradient, aux_seed), self._kept.unpack(place, kept)
                grads, dx = program.residuals.backward(self._take(program, storage), held, dy)
                return own_gradient(self._params, program.stage, grads), self._leave(program, dx)

            return run

        return self._switch(at, branch)

    def backward_input(
        self, at: Cell, storage: PyTree, kept: PyTree, gradient: PyTree, aux_seed: jax.Array
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Run the half of the backward that the part before waits for.

        Returns:
            `(gradients of the stage's own parameters, zero where the other half gives them, gradient of what arrived,
            what the other half needs)`, in common form.
        """
        if self._is_empty:
            return own_gradient(self._params, 0, {}), gradient, self._pending.zeros()

        def branch(place: int) -> Callable[[], tuple[PyTree, PyTree, PyTree]]:
            program = self._programs[place]

            def run() -> tuple[PyTree, PyTree, PyTree]:
                assert program.split is not None
                dy, held = self._seeds(program, gradient, aux_seed), self._kept.unpack(place, kept)
                grads, dx, pending = program.split.input_half(self._take(program, storage), held, dy)
                own = own_gradient(self._params, program.stage, _given(grads))
                return own, self._leave(program, dx), self._pending.pack(place, pending)

            return run

        return self._switch(at, branch)

    def backward_weight(self, at: Cell, storage: PyTree, kept: PyTree, pending: PyTree) -> PyTree:
        """Run the other half.

        Returns:
            Gradients of the stage's own parameters, zero where the input half gave them, in common form.
        """
        if self._is_empty:
            return own_gradient(self._params, 0, {})

        def branch(place: int) -> Callable[[], PyTree]:
            program = self._programs[place]

            def run() -> PyTree:
                assert program.split is not None
                held, left = self._kept.unpack(place, kept), self._pending.unpack(place, pending)
                grads = program.split.weight_half(self._take(program, storage), held, left)
                return own_gradient(self._params, program.stage, _given(grads))

            return run

        return self._switch(at, branch)

    def evaluate(
        self, at: Cell, storage: PyTree, collections: PyTree, first: PyTree, arrived: PyTree, context: Context
    ) -> PyTree:
        """Forward pass outside training."""
        if self._is_empty:
            return self._entering(at, first, arrived)

        def branch(place: int) -> Callable[[], PyTree]:
            program = self._programs[place]

            def run() -> PyTree:
                x = first if program.part == 0 else self._arriving.unpack(program.part - 1, arrived)
                full = self._context(program, at, collections, context)
                out, _ = program.run(self._take(program, storage), x, full, train=False)
                return self._leaving.pack(program.part, out)

            return run

        return self._switch(at, branch)

    def _entering(self, at: Cell, first: PyTree, arrived: PyTree) -> PyTree:
        return select(at.is_part(0), first, arrived) if 0 in at.parts else arrived

    def _switch(self, at: Cell, branch: Callable[[int], Callable[[], Any]]) -> Any:
        """Run the branch of a part, of those that the cell can be."""
        places = sorted({self._branch[part] for part in at.parts})
        if len(places) == 1:
            return branch(places[0])()
        index = [places.index(place) if place in places else 0 for place in self._branch]
        return jax.lax.switch(jnp.asarray(index, jnp.int32)[at.part], [branch(place) for place in places])

    def _seeds(self, program: _Program, gradient: PyTree, aux_seed: jax.Array) -> list[jax.Array]:
        seeds = [aux_seed] if self.aux[program.part].has_losses else []
        return [*self._outgoing.unpack(program.part, gradient), *seeds]

    def _leave(self, program: _Program, dx: list[jax.Array]) -> PyTree:
        member = program.part - 1 if program.part else self._before_first
        return self._gradients.zeros() if member is None else self._gradients.pack(member, dx)

    def _take(self, program: _Program, storage: PyTree) -> dict[str, jax.Array]:
        return {name: self._params.layout.get(program.stage, name, storage) for name in program.names}

    def _context(self, program: _Program, at: Cell, collections: PyTree, context: Context) -> tuple[Any, ...]:
        offset = jnp.asarray(self._starts, jnp.int32)[at.part] - program.layers.start
        return (offset, *context, self._collections.views(program.stage, program.layers, collections))

    def _build(self, plan: Blueprint, cut: StageCut, part: int) -> _Program:
        s = plan.placement.home[part][0]
        stage = self._params.stages[s]

        def run(leaves: dict[str, jax.Array], inputs: PyTree, context: tuple, *, train: bool) -> tuple[PyTree, Any]:
            offset, key, side, held = context
            views = [stage.view(i, leaves) for i in cut.prologue]
            return plan.module.run_layers(cut.prologue, views, train=train, offset=offset)(inputs, key, side, held)

        def in_training(leaves: dict[str, jax.Array], inputs: PyTree, context: tuple) -> tuple[PyTree, PyTree]:
            y, extras = run(leaves, inputs, context, train=True)
            aux = self.aux[part]
            loss, values = aux.collect([reported for _, reported in extras], self.num_values)
            return (y, loss) if aux.has_losses else (y,), ([held for held, _ in extras], values)

        names = tuple(stage.names_of(cut.prologue))
        struct = {name: self._params.layout.struct_of(s, name) for name in names}
        offset = jax.ShapeDtypeStruct((), jnp.int32)
        context = (offset, *plan.context, [plan.trace.collections[i] for i in cut.prologue])
        residuals = Residuals(in_training, struct, plan.trace.boundaries[cut.prologue.start], context)
        label = ", ".join(plan.module.layers[i].name for i in cut.prologue)
        split = split_backward(residuals, struct, label) if self._is_split else None
        return _Program(part, s, cut.prologue, names, run, residuals, split)

    def _sharing_key(self, plan: Blueprint, cut: StageCut, part: int) -> Any:
        """Equal for parts that one branch can serve: alike layers, with parameters at the same places."""
        layers = [plan.module.layers[i] for i in cut.prologue]
        if part == 0 or any(named.tied_key is not None for named in layers):
            return ("part", part)
        s = plan.placement.home[part][0]
        names = self._params.stages[s].names_of(cut.prologue)
        places = tuple(self._params.layout.place(s, name) for name in names)
        held = self._collections.places(s, cut.prologue)
        shapes = self._arriving.describe(part - 1), self._leaving.describe(part)
        return tuple(plan.signatures[i] for i in cut.prologue), places, held, shapes


def _given(grads: Mapping[str, jax.Array | None]) -> dict[str, jax.Array]:
    return {name: grad for name, grad in grads.items() if grad is not None}


def own_gradient(params: ModelParams, stage: int, grads: Mapping[str, jax.Array]) -> PyTree:
    """Gradients of a stage's own parameters in the form they are summed in; what is not given is zero."""
    layout = params.grad_layout
    common = {
        name: grads[name].astype(like.dtype) if name in grads else jnp.zeros(like.shape, like.dtype)
        for name, like in layout.stacked.items()
        if name in params.common_names
    }
    return {"stacked": common, "packed": layout.pack_own(stage, grads)}
