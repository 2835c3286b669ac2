"""Compiling a program for a mesh, apart from JAX's cache on disk where that would harm."""

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


def compile_program(
    function: Any, *args: Any, when_lowered: Callable[[jax.stages.Lowered], object] = lambda lowered: None
) -> jax.stages.Compiled:
    """Compile a jitted function, so that its next call finds the program in memory.

    A program for several CPU devices is neither read from JAX's persistent compilation cache nor written to it: read
    back, it has lost the order of its collectives (JAX 0.10.2). One device is then in a reduction with its neighbours
    while another waits in an exchange with all of them, for ever.

    Args:
        function: What `jax.jit` returned.
        args: Its arguments, or structs with their shardings; the first leaf tells the devices.
        when_lowered: Called before the long part; what it raises ends the call.

    Returns:
        The program.
    """
    sharding = getattr(jax.tree.leaves(args)[0], "sharding", None)
    devices = () if sharding is None else sharding.device_set
    is_simulated = len(devices) > 1 and next(iter(devices)).platform == "cpu"
    with without_cache() if is_simulated else contextlib.nullcontext():
        lowered = function.lower(*args)
        when_lowered(lowered)
        return lowered.compile()


# The setting is the whole process's. With two threads in here, the first to leave would switch the cache on for the
# other.
_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def without_cache() -> Generator[None]:
    """Compile apart from JAX's persistent cache inside; also for devices that are not there, which cannot read it."""
    with _ONE_AT_A_TIME:
        settings: dict[str, Any] = jax.config.values
        if not (settings["jax_enable_compilation_cache"] and settings["jax_compilation_cache_dir"]):
            yield
            return
        # JAX looks at the setting once and keeps the answer: `reset_cache` makes it look again. Files stay.
        try:
            jax.config.update("jax_enable_compilation_cache", False)
            compilation_cache.reset_cache()
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", True)
            compilation_cache.reset_cache()
