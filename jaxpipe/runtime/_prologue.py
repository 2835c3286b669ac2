"""The prologue: what only some stages have before the trunk, under one switch on the stage."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.layers import ModelTrace, PipelineModule

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
    run: Callable[..., PyTree]
    residuals: Residuals


class Prologue:
    """Forward and backward of each stage's prologue, from what arrives at the stage to the trunk's input.

    On stage 0 what arrives is the model's inputs. Stages whose prologues are alike share one branch; where no stage
    has one there is no switch.

    Args:
        module: The model.
        trace: Its shapes.
        cuts: The stages.
        params: Where the parameters lie.
        context: Shapes and dtypes of a microbatch's key and side inputs.
        signatures: Per layer a value that is equal for alike layers.
        arriving: Common form of what stages hand over; member s is the output of stage s.
        leaving: Common form of the prologues' outputs; member s belongs to stage s.
    """

    def __init__(
        self,
        module: PipelineModule,
        trace: ModelTrace,
        cuts: Sequence[StageCut],
        params: ModelParams,
        context: PyTree,
        signatures: Sequence[Hashable],
        arriving: Packing,
        leaving: Packing,
    ) -> None:
        self._params, self._arriving, self._leaving = params, arriving, leaving
        self._gradients = Packing([differentiable(arriving.struct_of(s)) for s in range(len(cuts))])
        self._programs: list[_Program] = []
        self._branch: list[int] = []
        self._starts = tuple(cut.prologue.start for cut in cuts)
        known: dict[Any, int] = {}
        for s, cut in enumerate(cuts):
            key = self._sharing_key(module, signatures, cut, s)
            if key not in known:
                known[key] = len(self._programs)
                self._programs.append(self._build(module, trace, cut, s, context))
            self._branch.append(known[key])
        self._kept = Packing([program.residuals.kept for program in self._programs])
        self._outgoing = Packing([differentiable(leaving.struct_of(s)) for s in range(len(cuts))])
        inputs = Packing([trace.boundaries[0], *(arriving.struct_of(s) for s in range(len(cuts)))])
        self._is_empty = len(cuts) > 1 and inputs.is_identity and not any(cut.prologue for cut in cuts)

    @property
    def has_params(self) -> bool:
        """Whether any stage has parameters before the trunk."""
        return any(program.names for program in self._programs)

    @property
    def kept(self) -> PyTree:
        """Shapes and dtypes of what `forward` returns beside the trunk's input."""
        return self._kept.struct

    def forward(
        self, stage: jax.Array, storage: PyTree, first: PyTree, arrived: PyTree, context: Context
    ) -> tuple[PyTree, PyTree]:
        """Compute the trunk's input.

        Args:
            stage: This device's stage.
            storage: Its parameters.
            first: The microbatch's inputs, which stage 0 takes.
            arrived: What arrived from the stage before, in common form.
            context: The microbatch's key and side inputs.

        Returns:
            `(trunk input, what backward needs)`, both in common form.
        """
        if self._is_empty:
            return jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), first, arrived), self._kept.zeros()

        def branch(place: int) -> Callable[[], tuple[PyTree, PyTree]]:
            program = self._programs[place]

            def run() -> tuple[PyTree, PyTree]:
                x = first if program.stage == 0 else self._arriving.unpack(program.stage - 1, arrived)
                out, kept = program.residuals.forward(
                    self._take(program, storage), x, self._context(program, stage, context)
                )
                return self._leaving.pack(program.stage, out), self._kept.pack(place, kept)

            return run

        return self._switch(stage, [branch(i) for i in range(len(self._programs))])

    def backward(self, stage: jax.Array, storage: PyTree, kept: PyTree, gradient: PyTree) -> tuple[PyTree, PyTree]:
        """Compute the gradients of the prologue.

        Args:
            stage: This device's stage.
            storage: Its parameters.
            kept: As `forward` returned it.
            gradient: Gradient of the trunk's input, in the common form of its differentiable leaves.

        Returns:
            `(gradients of the stage's own parameters, gradient of what arrived)`, in common form.
        """
        if self._is_empty:
            return own_gradient(self._params, 0, {}), gradient

        def branch(place: int) -> Callable[[], tuple[PyTree, PyTree]]:
            program = self._programs[place]

            def run() -> tuple[PyTree, PyTree]:
                dy = self._outgoing.unpack(program.stage, gradient)
                grads, dx = program.residuals.backward(self._take(program, storage), self._kept.unpack(place, kept), dy)
                own = own_gradient(self._params, program.stage, grads)
                return own, self._gradients.zeros() if program.stage == 0 else self._gradients.pack(
                    program.stage - 1, dx
                )

            return run

        return self._switch(stage, [branch(i) for i in range(len(self._programs))])

    def evaluate(self, stage: jax.Array, storage: PyTree, first: PyTree, arrived: PyTree, context: Context) -> PyTree:
        """Forward pass outside training."""
        if self._is_empty:
            return jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), first, arrived)

        def branch(program: _Program) -> Callable[[], PyTree]:
            def run() -> PyTree:
                x = first if program.stage == 0 else self._arriving.unpack(program.stage - 1, arrived)
                out = program.run(self._take(program, storage), x, self._context(program, stage, context), train=False)
                return self._leaving.pack(program.stage, out)

            return run

        return self._switch(stage, [branch(program) for program in self._programs])

    def _switch(self, stage: jax.Array, branches: Sequence[Callable[[], Any]]) -> Any:
        if len(branches) == 1:
            return branches[0]()
        return jax.lax.switch(jnp.asarray(self._branch, jnp.int32)[stage], branches)

    def _take(self, program: _Program, storage: PyTree) -> dict[str, jax.Array]:
        return {name: self._params.layout.get(program.stage, name, storage) for name in program.names}

    def _context(self, program: _Program, stage: jax.Array, context: Context) -> tuple[Any, ...]:
        return (jnp.asarray(self._starts, jnp.int32)[stage] - program.layers.start, *context)

    def _build(self, module: PipelineModule, trace: ModelTrace, cut: StageCut, s: int, context: PyTree) -> _Program:
        stage = self._params.stages[s]

        def run(leaves: dict[str, jax.Array], inputs: PyTree, context: tuple, *, train: bool = True) -> PyTree:
            offset, key, side = context
            views = [stage.view(i, leaves) for i in cut.prologue]
            return module.run_layers(cut.prologue, views, train=train, offset=offset)(inputs, key, side)

        names = tuple(stage.names_of(cut.prologue))
        struct = {name: self._params.struct[stage.own[name]] for name in names}
        offset = jax.ShapeDtypeStruct((), jnp.int32)
        residuals = Residuals(run, struct, trace.boundaries[cut.prologue.start], (offset, *context))
        return _Program(s, cut.prologue, names, run, residuals)

    def _sharing_key(self, module: PipelineModule, signatures: Sequence[Hashable], cut: StageCut, s: int) -> Any:
        """Equal for stages that one branch can serve: alike layers, with parameters at the same places."""
        layers = [module.layers[i] for i in cut.prologue]
        if s == 0 or any(named.tied_key is not None for named in layers):
            return ("stage", s)
        names = self._params.stages[s].names_of(cut.prologue)
        places = tuple(self._params.layout.place(s, name) for name in names)
        shapes = self._arriving.describe(s - 1), self._leaving.describe(s)
        return tuple(signatures[i] for i in cut.prologue), places, shapes


def own_gradient(params: ModelParams, stage: int, grads: dict[str, jax.Array]) -> PyTree:
    """Gradients of a stage's own parameters in the form they are summed in; what is not given is zero."""
    stacked = params.layout.stacked
    common = {
        name: grads[name] if name in grads else jnp.zeros(stacked[name].shape, stacked[name].dtype)
        for name in params.common_names
    }
    return {"stacked": common, "packed": params.layout.pack_own(stage, grads)}
