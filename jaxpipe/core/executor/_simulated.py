"""Simulated devices: how JAX treats them differently, and the workarounds.

Tests and first experiments run on several simulated CPU devices in one process
(`jax_num_cpu_devices`). Observed with JAX 0.10.2:

- Simulated devices share the CPU's cores, so computing an idle action would take its full time away
  from the other devices. A loop that runs zero or one time around the action costs nothing on CPU.
  On a GPU such a loop waits for the host twice. See `loops_idle`.
- A `collective-permute` waits for all devices of the program, even those that take another branch,
  so it deadlocks inside a branch. XLA's partitioner inserts one where it moves slices along an
  automatic axis. Its other collectives use groups of devices along that axis, and all devices of a
  group take the same branch. See `waits_in_branches` and `check_branches`.
- A program loaded from JAX's cache on disk has lost the order of its collectives. It deadlocks when
  one device is in a reduction with its neighbours while another waits in an exchange with all
  devices. See `compile_program`.

GPUs of one process also wait for each other in the first call of an exchange. If stages share a
process, their program is checked like that of simulated devices. See `is_checked`.
"""

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jaxpipe.distributed.topology import automatic_axes
from jaxpipe.errors import LayerError
from jaxpipe.programs.compiled import Module


def loops_idle(mesh: Mesh) -> bool:
    """True if idle actions are best skipped by loops that run zero or one time."""
    return is_simulated(mesh) and not automatic_axes(mesh)


def waits_in_branches(mesh: Mesh) -> bool:
    """True if moving a slice between devices inside a branch may deadlock."""
    return is_simulated(mesh) and bool(automatic_axes(mesh))


def is_simulated(mesh: Mesh) -> bool:
    """True if the mesh's devices are simulated on the CPU."""
    return mesh.devices.flat[0].platform == "cpu"


def is_checked(mesh: Mesh) -> bool:
    """True if programs for the mesh must be checked for slices that are moved in branches."""
    is_gpu = mesh.devices.flat[0].platform in ("gpu", "cuda", "rocm")
    may_wait = is_gpu and bool(automatic_axes(mesh)) and _stages_share_process(mesh)
    return waits_in_branches(mesh) or may_wait


def _stages_share_process(mesh: Mesh) -> bool:
    axis = mesh.axis_names.index("stage")
    found = dict[int, int]()
    return any(
        found.setdefault(device.process_index, place[axis]) != place[axis]
        for place, device in np.ndenumerate(mesh.devices)
    )


def check_branches(text: str) -> None:
    """Raise LayerError if a compiled program moves slices in a branch, where it would deadlock."""
    module = Module(text)
    # A loop inside a branch is part of the branch.
    branches = {
        name
        for lines in module.computations.values()
        for line in lines.values()
        if line.op == "conditional"
        for name in line.branches
    }
    shifts = [
        line
        for name in sorted(branches)
        for line in module.all_lines(name)
        if line.op.removesuffix("-start") == "collective-permute"
    ]
    if shifts:
        path = shifts[0].scope.rpartition("branch_")[2].partition("/")[2]
        where = path or "an operation without a name"
        raise LayerError(
            "layers that only some stages run must not cut what is sharded at other places than "
            f"the mesh does, but got {len(shifts)} slices that are moved from device to device, "
            f"the first for {where}. Devices that share one process, such as simulated devices, "
            "would deadlock. Start one process per GPU, use jax.lax.with_sharding_constraint to "
            "make the array whole along the dim that is cut, or replace a weight that combines "
            "several, such as query, key and value, by separate weights."
        )


def compile_program(
    function: Any,
    *args: Any,
    when_lowered: Callable[[jax.stages.Lowered], object] = lambda lowered: None,
) -> jax.stages.Compiled:
    """Compile a jitted function in advance, so that its next call finds the program in memory."""
    # `args` may be shapes and dtypes with shardings; the first leaf determines the devices.
    sharding = getattr(jax.tree.leaves(args)[0], "sharding", None)
    devices = () if sharding is None else sharding.device_set
    are_simulated = len(devices) > 1 and next(iter(devices)).platform == "cpu"
    # A program from the cache on disk may deadlock on several CPU devices: see the top of this
    # file.
    with without_cache() if are_simulated else contextlib.nullcontext():
        lowered = function.lower(*args)
        when_lowered(lowered)
        return lowered.compile()


def compile_checked(function: Any, mesh: Mesh, *args: Any) -> None:
    """Compile a jitted function and raise LayerError if the program would deadlock."""
    program = compile_program(function, *args)
    if is_checked(mesh):
        check_branches(program.as_text() or "")


# The setting belongs to the whole process. With two threads inside, the first to leave would enable
# the cache for the other.
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def without_cache() -> Generator[None]:
    """Disable JAX's persistent compilation cache inside the context."""
    # Also needed for devices that do not exist on this machine, which cannot read the cache.
    with _ONE_AT_A_TIME:
        settings: dict[str, Any] = jax.config.values
        if not (settings["jax_enable_compilation_cache"] and settings["jax_compilation_cache_dir"]):
            yield
            return
        # JAX reads the setting once and remembers it. `reset_cache` makes JAX read it again and
        # keeps the files.
        try:
            jax.config.update("jax_enable_compilation_cache", False)
            compilation_cache.reset_cache()
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", True)
            compilation_cache.reset_cache()
