"""Compile the real program of a candidate ahead of time, without its devices."""

import importlib.util
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxpipe.core.executor import without_cache
from jaxpipe.core.planner import HARDWARE, Hardware
from jaxpipe.distributed import compiles_for_tpus_anywhere
from jaxpipe.errors import ConfigError
from jaxpipe.programs.compiled import (
    DUMP_OPTION,
    Module,
    StepReading,
    host_waits,
    read_step,
    read_thunks,
)

_H200 = Path(__file__).with_name("h200_target.txtpb")
_UNLIKE: dict[str, dict[str, str]] = {
    "h200": {},
    "h100": {
        "memory_bandwidth": "3350000000000",
        "device_memory_size": "80000000000",
        "device_description_str": '"NVIDIA H100 80GB HBM3"',
    },
    "b200": {
        "core_count": "148",
        "memory_bandwidth": "7672320000000",
        "l2_cache_size": "132644864",
        "clock_rate_ghz": "1.965",
        "device_memory_size": "191514411008",
        "cuda_compute_capability": "{ major: 10 }",
        "device_description_str": '"NVIDIA B200"',
    },
}
"""Fields in which XLA's descriptions of other GPUs differ from that of an H200."""

_TPUS = {"v5e": 2, "v5p": 3, "v6e": 2}
"""TPUs that programs can be compiled for, and the number of dims of their slices."""

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step.

    Attributes:
        label: The candidate.
        argument_bytes: Bytes of the step's arguments on each device: masters, moments, the batch.
        temporary_bytes: Bytes of everything besides the arguments, on each device.
        total_bytes: Bytes on each device.
        counted_bytes: Bytes on each device according to the forecast.
        compile_s: Seconds to trace and compile the step.
        reading: What its loops over ticks hold.
    """

    label: str
    argument_bytes: int
    temporary_bytes: int
    total_bytes: int
    counted_bytes: float
    compile_s: float
    reading: StepReading

    def __str__(self) -> str:
        ratio = self.counted_bytes / self.total_bytes
        read = self.reading
        waits = "" if read.host_waits is None else f", the host waits {read.host_waits} times"
        return (
            f"compiled {self.label} in {self.compile_s:.0f} s: {self.argument_bytes / 1e9:.2f} GB "
            f"of arguments, {self.temporary_bytes / 1e9:.2f} GB of temporaries, "
            f"{self.total_bytes / 1e9:.2f} GB in total; the forecast is {ratio:.2f} times that. Of "
            f"{read.num_collectives} collectives of a steady tick, {len(read.alone)} run beside no "
            f"product{waits}"
        )


def target_config(hardware: Hardware) -> str:
    """Return XLA's description of a device to compile for; raises ConfigError if there is none."""
    if hardware.name not in _UNLIKE:
        known = ", ".join(sorted([*_UNLIKE, *_TPUS]))
        raise ConfigError(
            f"programs can be compiled ahead of time for {known}, but got {hardware.name!r}. Pass "
            "target_config=<text of XLA's GpuTargetConfigProto>, or plan without compiling."
        )
    text = _H200.read_text()
    # Changed hardware, such as `--memory-gb`, changes the description: XLA schedules for the memory
    # and the bandwidth that it is told.
    unlike = dict(_UNLIKE[hardware.name])
    known = HARDWARE[hardware.name]
    if hardware.memory_bytes != known.memory_bytes:
        unlike["device_memory_size"] = f"{hardware.memory_bytes:.0f}"
    if hardware.bytes_per_s != known.bytes_per_s:
        unlike["memory_bandwidth"] = f"{hardware.bytes_per_s:.0f}"
    for field, value in unlike.items():
        text = re.sub(rf"\b{field}:? .*", f"{field}: {value}", text)
    return text


def compilable_devices(hardware: Hardware, count: int, target: str | None = None) -> Sequence[Any]:
    """Return devices that programs can be compiled for, host by host.

    XLA gets their description from `target`, or from `target_config` if that is None.
    """
    if hardware.name in _TPUS and target is None:
        return _tpus(hardware, count)
    text = target_config(hardware) if target is None else target
    if not any(map(importlib.util.find_spec, _PLUGINS)):
        raise ConfigError(
            "compiling for GPUs needs JAX's CUDA plugin, but got none installed. Run pip install "
            "'jaxpipe[cuda13]', which needs no GPU, or plan without compiling."
        )
    # XLA takes hosts of equally many devices.
    hosts = max(1, -(-count // hardware.devices_per_host))
    if count % hosts:
        raise ConfigError(
            f"devices must fill hosts of {hardware.devices_per_host} for compiling, but got "
            f"{count} devices. Use a multiple of {hardware.devices_per_host}."
        )
    description = topologies.get_topology_desc(
        platform="cuda", topology=f"1x{hosts}x{count // hosts}", target_config=text
    )
    return description.devices


def _tpus(hardware: Hardware, count: int) -> Sequence[Any]:
    """Return the devices of a TPU slice that is as close to a square or a cube as possible."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "compiling for TPUs needs the package libtpu, but got none installed. Run pip "
            "install 'jaxpipe[tpu]', which needs no TPU, or plan without compiling."
        )
    compiles_for_tpus_anywhere()
    # A slice near a cube has the shortest ways between its chips.
    sides = [1] * _TPUS[hardware.name]
    left = count
    while left % 2 == 0:
        sides[sides.index(min(sides))] *= 2
        left //= 2
    if left != 1:
        raise ConfigError(
            "programs for TPUs must be compiled for a number of chips that is a power of two, but "
            f"got {count}. Round it."
        )
    # Slices are named by their sides in increasing order, with those of one chip last.
    sides.sort(key=lambda side: (side == 1, side))
    name = f"{hardware.name}:{'x'.join(map(str, sides))}"
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(
            f"programs for TPUs must be compiled for a slice that exists, but got {count} chips "
            f"as {name}: {error}. Use at least 4 chips and at most a pod."
        ) from error


def compile_step(label: str, counted_bytes: float, build: Any) -> CompiledStep:
    """Compile the step of the pipeline that `build` returns, and read its memory."""
    start = time.perf_counter()
    pipeline = build()
    lowered = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct)
    is_gpu = pipeline.mesh.devices.flat[0].platform in ("gpu", "cuda")
    # A program from JAX's cache on disk would leave no dump, and needs the devices to be read.
    with tempfile.TemporaryDirectory(prefix="jaxpipe-") as folder, without_cache():
        compiled = lowered.compile(compiler_options={DUMP_OPTION: folder} if is_gpu else None)
        module = Module(compiled.as_text() or "")
        thunks = read_thunks(Path(folder), module.steady_loop()) if is_gpu else []
    waits = host_waits(thunks, module) if is_gpu else None
    memory = compiled.memory_analysis()
    if memory is None:
        raise ConfigError(
            "the backend must report the memory of programs, but got no report. Plan without "
            "compiling."
        )
    # A donated argument and its output are one array.
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    total += memory.output_size_in_bytes - memory.alias_size_in_bytes
    return CompiledStep(
        label,
        memory.argument_size_in_bytes,
        total - memory.argument_size_in_bytes,
        total,
        counted_bytes,
        time.perf_counter() - start,
        read_step(module, dict(pipeline.mesh.shape), waits),
    )
