"""The program that makes a layer's initial leaves, and whether it can run on the devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.typing import Path
from jaxpipe.programs.jaxpr import (
    Literal,
    Program,
    Slice,
    all_equations,
    effects_of,
    evaluate,
    needed_for,
    primitives,
    read,
)

from ._layout import is_key

_THREEFRY = "key<fry>"


@dataclass(frozen=True)
class Recipe:
    """The program that makes a layer's leaves from its key."""

    number: int  # equal programs have equal numbers
    program: Program
    # The program's variables that are leaves, by field and path inside the layer.
    leaves: Mapping[tuple[str, Path], Any]
    # Why the program can only run on the host; empty if it can run on any device.
    fault: str

    def run(self, key: jax.Array, wanted: Sequence[tuple[str, Path]]) -> list[jax.Array]:
        """Compute some of the leaves."""
        atoms = [self.leaves[name] for name in wanted]
        part = needed_for(self.program, atoms)
        values, _ = evaluate(
            self.program, dict(zip(self.program.inputs, [key], strict=True)), part, {}, ()
        )
        return [jnp.asarray(read(values, atom)) for atom in atoms]


def fault_of(program: Program, part: Slice) -> str:
    """Explain why an initialiser's program cannot run on the devices; empty if it can."""
    eqns = list(all_equations(eqn for eqn in program.eqns if id(eqn) in part.steps))
    if effects_of(program) & part.steps:
        return "has side effects"
    names = {eqn.primitive.name for eqn in eqns}
    if names & primitives.CALLBACKS:
        return "calls Python back"
    atoms = [x for eqn in eqns for x in eqn.invars]
    values = [x.val for x in atoms if isinstance(x, Literal)] + [
        program.consts[x] for x in part.variables if x in program.consts
    ]
    if any(np.ndim(value) > 0 for value in values if not is_key(getattr(value, "dtype", None))):
        return "holds arrays"
    keys = {str(x.aval.dtype) for x in atoms if is_key(getattr(x.aval, "dtype", None))}
    if keys - {_THREEFRY} or names & primitives.DEVICE_RANDOM_BITS:
        return "draws with another generator than threefry"
    return ""
