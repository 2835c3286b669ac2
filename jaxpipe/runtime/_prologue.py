"""The prologue: what only some stages have before the trunk, under one switch on the stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree

from ._aux import AuxSlots
from ._blueprint import Blueprint
from ._cut import StageCut
from ._packing import Packing
from ._params import ModelParams
from ._residuals import Residuals, differentiable
from ._trunk import Context


@dataclass(frozen=True)
class _Program:
    """One branch of the switch: the stage it was built for, and its forward and backward."""

    stage: int
    layers: range
    names: tuple[str, ...]
    run: Callable[..., tuple[PyTree, Any]]
    residuals: Residuals


class Prologue:
    """Forward and backward of each stage's prologue, from what arrives at the stage to the trunk's input.

    On stage 0 what arrives is the model's inputs. Stages whose prologues are alike share one branch; where no stage
    has one there is no switch.

    Args:
        plan: The model, cut.
        arriving: Common form of what stages hand over; member s is the output of stage s.
        leaving: Common form of the prologues' outputs; member s belongs to stage s.

    Attributes:
        aux: What the prologue of each stage reports.
        num_values: Length of the vector of values reported.
    """

    def __init__(self, plan: Blueprint, arriving: Packing, leaving: Packing) -> None:
        self._params, self._collections = plan.params, plan.collections
        self._arriving, self._leaving = arriving, leaving
        stages = range(len(plan.cuts))
        self._gradients = Packing([differentiable(arriving.struct_of(s)) for s in stages])
        self._programs: list[_Program] = []
        self._branch: list[int] = []
        self._starts = tuple(cut.prologue.start for cut in plan.cuts)
        self.aux = [AuxSlots(plan.module.layers, plan.trace, cut.prologue) for cut in plan.cuts]
        self.num_values = max(len(aux.names) for aux in self.aux)
        known: dict[Any, int] = {}
        for s, cut in enumerate(plan.cuts):
            key = self._sharing_key(plan, cut, s)
            if key not in known:
                known[key] = len(self._programs)
                self._programs.append(self._build(plan, cut, s))
            self._branch.append(known[key])
        self._kept = Packing([program.residuals.kept for program in self._programs])
        self._outgoing = Packing([differentiable(leaving.struct_of(s)) for s in stages])
        inputs = Packing([plan.trace.boundaries[0], *(arriving.struct_of(s) for s in stages)])
        self._is_empty = len(plan.cuts) > 1 and inputs.is_identity and not any(cut.prologue for cut in plan.cuts)

    @property
    def has_params(self) -> bool:
        """Whether any stage has parameters before the trunk."""
        return any(program.names for program in self._programs)

    @property
    def kept(self) -> PyTree:
        """Shapes and dtypes of what `forward` returns beside the trunk's input."""
        return self._kept.struct

    def forward(
        self,
        stage: jax.Array,
        storage: PyTree,
        collections: PyTree,
        first: PyTree,
        arrived: PyTree,
        context: Context,
    ) -> tuple[PyTree, PyTree, PyTree, jax.Array]:
        """Compute the trunk's input.

        Args:
            stage: This device's stage.
            storage: Its parameters.
            collections: Its collections.
            first: The microbatch's inputs, which stage 0 takes.
            arrived: What arrived from the stage before, in common form.
            context: The microbatch's key and side inputs.

        Returns:
            `(trunk input, what backward needs, collections, values reported)`, the first two in common form.
        """
        if self._is_empty:
            x = jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), first, arrived)
            return x, self._kept.zeros(), collections, jnp.zeros((0,), jnp.float32)

        def branch(place: int) -> Callable[[], tuple]:
            program = self._programs[place]

            def run() -> tuple:
                x = first if program.stage == 0 else self._arriving.unpack(program.stage - 1, arrived)
                full = self._context(program, stage, collections, context)
                (out, *_), (held, values), kept = program.residuals.forward(self._take(program, storage), x, full)
                new = self._collections.put(program.stage, program.layers, collections, held)
                return self._leaving.pack(program.stage, out), self._kept.pack(place, kept), new, values

            return run

        return self._switch(stage, [branch(i) for i in range(len(self._programs))])

    def backward(
        self, stage: jax.Array, storage: PyTree, kept: PyTree, gradient: PyTree, aux_seed: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """Compute the gradients of the prologue.

        Args:
            stage: This device's stage.
            storage: Its parameters.
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
                dy = [*self._outgoing.unpack(program.stage, gradient)]
                dy += [aux_seed] if self.aux[program.stage].has_losses else []
                grads, dx = program.residuals.backward(self._take(program, storage), self._kept.unpack(place, kept), dy)
                own = own_gradient(self._params, program.stage, grads)
                return own, self._gradients.zeros() if program.stage == 0 else self._gradients.pack(
                    program.stage - 1, dx
                )

            return run

        return self._switch(stage, [branch(i) for i in range(len(self._programs))])

    def evaluate(
        self, stage: jax.Array, storage: PyTree, collections: PyTree, first: PyTree, arrived: PyTree, context: Context
    ) -> PyTree:
        """Forward pass outside training."""
        if self._is_empty:
            return jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), first, arrived)

        def branch(program: _Program) -> Callable[[], PyTree]:
            def run() -> PyTree:
                x = first if program.stage == 0 else self._arriving.unpack(program.stage - 1, arrived)
                full = self._context(program, stage, collections, context)
                out, _ = program.run(self._take(program, storage), x, full, train=False)
                return self._leaving.pack(program.stage, out)

            return run

        return self._switch(stage, [branch(program) for program in self._programs])

    def _switch(self, stage: jax.Array, branches: Sequence[Callable[[], Any]]) -> Any:
        if len(branches) == 1:
            return branches[0]()
        return jax.lax.switch(jnp.asarray(self._branch, jnp.int32)[stage], branches)

    def _take(self, program: _Program, storage: PyTree) -> dict[str, jax.Array]:
        return {name: self._params.layout.get(program.stage, name, storage) for name in program.names}

    def _context(self, program: _Program, stage: jax.Array, collections: PyTree, context: Context) -> tuple[Any, ...]:
        offset = jnp.asarray(self._starts, jnp.int32)[stage] - program.layers.start
        return (offset, *context, self._collections.views(program.stage, program.layers, collections))

    def _build(self, plan: Blueprint, cut: StageCut, s: int) -> _Program:
        stage = self._params.stages[s]

        def run(leaves: dict[str, jax.Array], inputs: PyTree, context: tuple, *, train: bool) -> tuple[PyTree, Any]:
            offset, key, side, held = context
            views = [stage.view(i, leaves) for i in cut.prologue]
            return plan.module.run_layers(cut.prologue, views, train=train, offset=offset)(inputs, key, side, held)

        def in_training(leaves: dict[str, jax.Array], inputs: PyTree, context: tuple) -> tuple[PyTree, PyTree]:
            y, extras = run(leaves, inputs, context, train=True)
            loss, values = self.aux[s].collect([aux for _, aux in extras], self.num_values)
            return (y, loss) if self.aux[s].has_losses else (y,), ([held for held, _ in extras], values)

        names = tuple(stage.names_of(cut.prologue))
        struct = {name: self._params.layout.struct_of(s, name) for name in names}
        offset = jax.ShapeDtypeStruct((), jnp.int32)
        context = (offset, *plan.context, [plan.trace.collections[i] for i in cut.prologue])
        residuals = Residuals(in_training, struct, plan.trace.boundaries[cut.prologue.start], context)
        return _Program(s, cut.prologue, names, run, residuals)

    def _sharing_key(self, plan: Blueprint, cut: StageCut, s: int) -> Any:
        """Equal for stages that one branch can serve: alike layers, with parameters at the same places."""
        layers = [plan.module.layers[i] for i in cut.prologue]
        if s == 0 or any(named.tied_key is not None for named in layers):
            return ("stage", s)
        names = self._params.stages[s].names_of(cut.prologue)
        places = tuple(self._params.layout.place(s, name) for name in names)
        held = self._collections.places(s, cut.prologue)
        shapes = self._arriving.describe(s - 1), self._leaving.describe(s)
        return tuple(plan.signatures[i] for i in cut.prologue), places, held, shapes


def own_gradient(params: ModelParams, stage: int, grads: dict[str, jax.Array]) -> PyTree:
    """Gradients of a stage's own parameters in the form they are summed in; what is not given is zero."""
    layout = params.grad_layout
    common = {
        name: grads[name].astype(like.dtype) if name in grads else jnp.zeros(like.shape, like.dtype)
        for name, like in layout.stacked.items()
        if name in params.common_names
    }
    return {"stacked": common, "packed": layout.pack_own(stage, grads)}
