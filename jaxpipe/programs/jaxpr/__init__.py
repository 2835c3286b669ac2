"""Reads, compares, slices and evaluates traced programs."""

from . import _primitives as primitives
from ._arithmetic import Arithmetic, arithmetic_of
from ._dependence import follow, output_dependence
from ._equation import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    ScanForm,
    all_equations,
    bind,
    bind_here,
    branches_of,
    called_program,
    effect_axes,
    is_named,
    name_of,
    programs_inside,
    region_policy,
    scan_form,
    scope_of,
    used_operands,
    with_consts,
)
from ._kernels import (
    ATTENTION_SCOPE,
    Kernel,
    blocks_scope,
    count_kernels,
    num_flops,
    program_kernels,
    result_specs,
)
from ._keys import Same, program_key
from ._numbering import value_numbers
from ._program import Program, Values, flatten, operands, read, value_of, variables, without_mesh
from ._reduced import REDUCED, reduced, save_reduced, save_whole
from ._sharding import constrained_axes, output_specs, propagated_specs, spec_axes, spec_without
from ._slice import Slice, computed_by, effects_of, evaluate, needed_for, reached_from
from ._turns import Turns, turns_of
from ._versions import check_jax
