import gc
import os
import tempfile
from importlib import metadata

# The tests spend their time compiling programs that run for milliseconds: they are optimised less,
# and written by XLA's older emitters in half the time. Processes that tests start inherit it.
QUICK = "--xla_backend_optimization_level=0"
if metadata.version("jaxlib").startswith(
    "0.10."
):  # newer ones have no other emitters, and abort over the flag
    QUICK += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"
# Without the lines of Python that each operation comes from, a tenth less time goes into programs.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

import jax  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tests compile the same oracles, initial values and small operations again and again. Each test
# process and run has a directory of its own: JAX writes entries in place, so that another process,
# or a later run, could read half of one.
CACHE = tempfile.TemporaryDirectory(prefix="jaxpipe-tests-", ignore_cleanup_errors=True)
jax.config.update("jax_compilation_cache_dir", CACHE.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# A loaded machine makes every example slow; that says nothing about the code.
settings.register_profile(
    "loaded_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("loaded_machine")


def pytest_collection_finish() -> None:
    """Leave out of garbage collections what is there before the first test: it stays to the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)  # traces make many objects, of which few are in circles
