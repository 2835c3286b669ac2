"""Devices that one CPU simulates: where JAX treats them differently, and what is done about it.

Tests and first tries run on them, several in one process (`jax_num_cpu_devices`). Seen with JAX
0.10.2:

- They share the CPU's cores, so that an idle action, if it were computed, would take its whole time
  from the others. A loop of one round or none around it costs nothing; a GPU waits for the host
  twice: `loops_idle`.
- A `collective-permute` waits for all devices of the program, also for those that take another
  branch, and so for ever. XLA's partitioner makes one where it moves slices along an automatic
  axis. Its other collectives go by groups of devices along that axis, all of which take the same
  branch: `waits_in_branches`, `check_branches`.
- A program that comes from JAX's cache on disk has lost the order of its collectives. One device is
  then in a reduction with its neighbours while another waits in an exchange with all of them, for
  ever: `compile_program`.

GPUs of one process wait for each other in the first call of an exchange, too. Where stages share a
process, their program is looked at as a simulated one is: `is_checked`.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jaxpipe.errors import LayerError
from jaxpipe.topology import automatic_axes

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_SHIFT = re.compile(r" collective-permute(?:-start)?\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


def loops_idle(mesh: Mesh) -> bool:
    """True if loops of one round or none skip idle actions best."""
    return is_simulated(mesh) and not automatic_axes(mesh)


def waits_in_branches(mesh: Mesh) -> bool:
    """True if a slice that is moved inside a branch may wait for ever."""
    return is_simulated(mesh) and bool(automatic_axes(mesh))


def is_simulated(mesh: Mesh) -> bool:
    """True if a mesh's devices are simulated by the CPU."""
    return mesh.devices.flat[0].platform == "cpu"


def is_checked(mesh: Mesh) -> bool:
    """True if a program for these devices is looked at for slices that are moved in branches."""
    is_gpu = mesh.devices.flat[0].platform in ("gpu", "cuda", "rocm")
    may_wait = is_gpu and bool(automatic_axes(mesh)) and _stages_share_process(mesh)
    return waits_in_branches(mesh) or may_wait


def _stages_share_process(mesh: Mesh) -> bool:
    axis, found = mesh.axis_names.index("stage"), dict[int, int]()
    return any(
        found.setdefault(device.process_index, place[axis]) != place[axis]
        for place, device in np.ndenumerate(mesh.devices)
    )


def check_branches(text: str) -> None:
    """Refuse a compiled program that would wait for ever.

    It would where slices are moved from device to device inside a branch. `text` is as
    `jax.stages.Compiled.as_text` gives it.
    """
    computations = _computations(text)
    # From every branch on, all that it calls: a loop inside a branch is in the branch, too.
    inside: set[str] = set()
    left = [name for lines in computations.values() for line in lines for name in _branches(line)]
    while left:
        name = left.pop()
        if name not in inside and name in computations:
            inside.add(name)
            left += [
                called
                for line in computations[name]
                for called in (*_CALLED.findall(line), *_branches(line))
            ]
    shifts = [line for name in sorted(inside) for line in computations[name] if _SHIFT.search(line)]
    if shifts:
        found = _OP_NAME.search(shifts[0])
        where = (
            found.group(1).rpartition("branch_")[2].partition("/")[2]
            if found
            else "an operation without a name"
        )
        raise LayerError(
            "layers that only some stages run must not cut what is sharded at other places than "
            f"the mesh does, but got {len(shifts)} slices that are moved from device to device, "
            f"the first for {where}. Devices of one process, as simulated ones are, would wait for "
            "each other for ever. Start one process for each GPU; or constrain what is cut there "
            "with jax.lax.with_sharding_constraint so that it is whole along the dim that is cut, "
            "or split weights that hold several parts, such as query, key and value, into one "
            "each."
        )


def _computations(text: str) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            lines = found[head.group(1)] = []
        else:
            lines.append(line)
    return found


def _branches(line: str) -> list[str]:
    if " conditional(" not in line:
        return []
    # Two branches are printed as `true_computation` and `false_computation`, others as one list.
    listed = _BRANCHES.search(line)
    return re.findall(r"[\w.\-]+", listed.group(1)) if listed else _CALLED.findall(line)


def compile_program(
    function: Any,
    *args: Any,
    when_lowered: Callable[[jax.stages.Lowered], object] = lambda lowered: None,
) -> jax.stages.Compiled:
    """Compile a jitted function, so that its next call finds the program in memory.

    A program for several CPU devices is neither read from JAX's cache on disk nor written to it.
    `args` may be structs with their shardings; the first leaf determines the devices.
    `when_lowered` is called before the long part, and what it raises ends the call.
    """
    sharding = getattr(jax.tree.leaves(args)[0], "sharding", None)
    devices = () if sharding is None else sharding.device_set
    are_simulated = len(devices) > 1 and next(iter(devices)).platform == "cpu"
    with without_cache() if are_simulated else contextlib.nullcontext():
        lowered = function.lower(*args)
        when_lowered(lowered)
        return lowered.compile()


def compile_checked(function: Any, mesh: Mesh, *args: Any) -> None:
    """Compile a jitted function, and refuse a program that would wait for ever."""
    program = compile_program(function, *args)
    if is_checked(mesh):
        check_branches(program.as_text() or "")


# The setting is the whole process's. With two threads in here, the first to leave would switch the
# cache on for the other.
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def without_cache() -> Generator[None]:
    """Compile apart from JAX's persistent cache inside.

    Also for devices that are not there, which cannot read it.
    """
    with _ONE_AT_A_TIME:
        settings: dict[str, Any] = jax.config.values
        if not (settings["jax_enable_compilation_cache"] and settings["jax_compilation_cache_dir"]):
            yield
            return
        # JAX looks at the setting once and keeps the answer: `reset_cache` makes it look again.
        # Files stay.
        try:
            jax.config.update("jax_enable_compilation_cache", False)
            compilation_cache.reset_cache()
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", True)
            compilation_cache.reset_cache()
