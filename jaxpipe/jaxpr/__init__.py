"""Reads, compares, slices and evaluates traced programs."""

from . import _primitives as primitives
from ._arithmetic import Arithmetic as Arithmetic
from ._arithmetic import arithmetic_of as arithmetic_of
from ._dependence import follow as follow
from ._dependence import output_dependence as output_dependence
from ._equation import ClosedJaxpr as ClosedJaxpr
from ._equation import Jaxpr as Jaxpr
from ._equation import Literal as Literal
from ._equation import ScanForm as ScanForm
from ._equation import all_equations as all_equations
from ._equation import bind as bind
from ._equation import bind_here as bind_here
from ._equation import branches_of as branches_of
from ._equation import called_program as called_program
from ._equation import effect_axes as effect_axes
from ._equation import is_named as is_named
from ._equation import name_of as name_of
from ._equation import programs_inside as programs_inside
from ._equation import region_policy as region_policy
from ._equation import scan_form as scan_form
from ._equation import scope_of as scope_of
from ._equation import used_operands as used_operands
from ._equation import with_consts as with_consts
from ._kernels import ATTENTION_SCOPE as ATTENTION_SCOPE
from ._kernels import Kernel as Kernel
from ._kernels import blocks_scope as blocks_scope
from ._kernels import count_kernels as count_kernels
from ._kernels import num_flops as num_flops
from ._kernels import program_kernels as program_kernels
from ._kernels import result_specs as result_specs
from ._keys import Same as Same
from ._keys import program_key as program_key
from ._numbering import value_numbers as value_numbers
from ._program import Program as Program
from ._program import Values as Values
from ._program import flatten as flatten
from ._program import operands as operands
from ._program import read as read
from ._program import value_of as value_of
from ._program import variables as variables
from ._program import without_mesh as without_mesh
from ._reduced import REDUCED as REDUCED
from ._reduced import reduced as reduced
from ._reduced import save_reduced as save_reduced
from ._reduced import save_whole as save_whole
from ._sharding import constrained_axes as constrained_axes
from ._sharding import output_specs as output_specs
from ._sharding import propagated_specs as propagated_specs
from ._sharding import spec_axes as spec_axes
from ._sharding import spec_without as spec_without
from ._slice import Slice as Slice
from ._slice import computed_by as computed_by
from ._slice import effects_of as effects_of
from ._slice import evaluate as evaluate
from ._slice import needed_for as needed_for
from ._slice import reached_from as reached_from
from ._turns import Turns as Turns
from ._turns import turns_of as turns_of
from ._versions import check_jax as check_jax

__all__ = [
    "ATTENTION_SCOPE",
    "REDUCED",
    "Arithmetic",
    "ClosedJaxpr",
    "Jaxpr",
    "Kernel",
    "Literal",
    "Program",
    "Same",
    "ScanForm",
    "Slice",
    "Turns",
    "Values",
    "all_equations",
    "bind",
    "bind_here",
    "blocks_scope",
    "arithmetic_of",
    "branches_of",
    "called_program",
    "check_jax",
    "computed_by",
    "constrained_axes",
    "count_kernels",
    "effect_axes",
    "effects_of",
    "evaluate",
    "flatten",
    "follow",
    "is_named",
    "name_of",
    "needed_for",
    "num_flops",
    "operands",
    "output_dependence",
    "output_specs",
    "primitives",
    "program_key",
    "program_kernels",
    "programs_inside",
    "propagated_specs",
    "reached_from",
    "read",
    "reduced",
    "region_policy",
    "result_specs",
    "save_reduced",
    "save_whole",
    "scan_form",
    "scope_of",
    "spec_axes",
    "spec_without",
    "turns_of",
    "used_operands",
    "value_numbers",
    "value_of",
    "variables",
    "with_consts",
    "without_mesh",
]
