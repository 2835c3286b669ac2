"""Checks of JAX's devices: that there are any, and that a node uses all of them."""

import os
import socket
import zlib
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

import jax
import numpy as np

from jaxpipe._util.warn import warn
from jaxpipe.errors import LaunchError

from ._gather import gather_numbers


def check_devices() -> None:
    """Let JAX initialise its devices, and raise a helpful error if it finds none."""
    try:
        jax.devices()
    # AssertionError: no plugin for the platform is installed.
    except (RuntimeError, AssertionError) as error:
        first = (str(error).strip().splitlines() or ["no plugin for it"])[0]
        raise LaunchError(
            "JAX must find devices of the platforms that it is told to use, but got JAX_PLATFORMS="
            f"{jax.config.values['jax_platforms']!r} and: {first}. For NVIDIA GPUs run pip install "
            "'jaxpipe[cuda13]' or 'jaxpipe[cuda12]' where the driver is there; or set "
            "JAX_PLATFORMS=cpu, or remove it."
        ) from error


def warn_of_unused_devices() -> None:
    """Warn if this node's processes leave GPUs unused; all processes must call this."""
    # Under Slurm and Open MPI, JAX assumes one GPU per process, so a single process on a node uses
    # one of its GPUs and leaves the others idle.
    platform = jax.local_devices()[0].platform
    own = [zlib.crc32(socket.gethostname().encode()), jax.local_device_count()]
    counts = gather_numbers(own)
    mine = counts[counts[:, 0] == np.uint32(own[0])]
    present = count_gpus(Path("/"), os.environ)
    if platform in ("gpu", "cuda", "rocm") and mine[:, 1].sum() < present:
        warn(
            f"the node {socket.gethostname()} has {present} GPUs, but its {len(mine)} processes "
            f"use {mine[:, 1].sum()} together. Start one process for each GPU, or give "
            f"init_distributed(local_device_ids=range({present})) to use all of them in one "
            "process.",
        )


def count_gpus(root: Path, environ: Mapping[str, str]) -> int:
    """The number of NVIDIA GPUs that a process can see; `root` is the root of the file system."""
    # All that the driver knows, unless `CUDA_VISIBLE_DEVICES` excludes some.
    known = len(list(root.glob("proc/driver/nvidia/gpus/*")))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return known
    # CUDA ignores what follows an invalid index.
    parts = (part.strip() for part in visible.split(","))
    return min(known, len(list(takewhile(lambda part: part not in ("", "-1"), parts))))


def simulate_devices(number: int) -> None:
    """Make JAX simulate devices on the CPU. Must be called before anything uses JAX's devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", number)
