"""Checks that all processes of a job do the same, made before anything depends on it."""

import os
import platform
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe._util.typing import PyTree
from jaxpipe.checkpoint import library_versions
from jaxpipe.config import TrainConfig, without_secrets
from jaxpipe.core.pipeline import Pipeline
from jaxpipe.distributed import checksum, compiler_variables, gather_numbers, gather_texts, listed
from jaxpipe.engine.monitor import MONITOR_SECTIONS
from jaxpipe.errors import ConfigError
from jaxpipe.layers import PipelineModule, format_struct, struct_of

SAME_START = "Start all with the same program, arguments, configuration, packages and environment."

_FLAGS = (
    "jax_allow_f16_reductions",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_enable_custom_prng",
    "jax_enable_x64",
    "jax_legacy_prng_key",
    "jax_numpy_dtype_promotion",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)
"""JAX flags that change what a program computes, or how it is partitioned."""
_SETTINGS = (
    "num_stages",
    "base_seed",
    "seed_layers",
    "partition_method",
    "activation_checkpoint_interval",
)
# Only process 0 writes there, so the settings may differ between processes.
_OF_PROCESS_0 = (
    *MONITOR_SECTIONS,
    "dump_state",
    "flops_profiler.output_file",
)
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
_AROUND = 60


def describe_start(  # noqa: PLR0913  # one part or value each
    settings: TrainConfig,
    module: PipelineModule,
    mesh: Mesh,
    example_batch: PyTree,
    model_parameters: PyTree,
    num_samples: int | None,
) -> dict[str, dict[str, str]]:
    """Describe the arguments of `initialize`, in the sections that `check_equal` compares."""
    named = {name: getattr(module, name) for name in _SETTINGS}
    layers = {f"layers[{each.index}]": each.name for each in module.layers}
    # `num_samples` is None without training data, or if they have no length.
    data = {"training_data": num_samples, "example_batch": _struct(example_batch)}
    flags = {name: getattr(jax.config, name, None) for name in _FLAGS}
    return {
        "configuration": _configuration(settings),
        "layers": _texts({**layers, **named}),
        "shapes of data": _texts(data),
        "model_parameters": describe_leaves(model_parameters),
        "mesh": _texts(
            {"axes": dict(mesh.shape), "devices": [device.id for device in mesh.devices.flat]}
        ),
        "JAX flags": _texts({**flags, **compiler_variables()}),
        "versions": {**library_versions(), "python": ".".join(platform.python_version_tuple()[:2])},
    }


def describe_state(pipeline: Pipeline) -> dict[str, str]:
    """Describe the structure of a model's state, and how the model is divided into stages."""
    # The optimiser state follows from the parameters.
    params = {
        key: leaf for key, leaf in pipeline.states.catalog.items() if key.startswith("params/")
    }
    leaves = {key: f"{leaf.dtype}{list(leaf.shape)}" for key, leaf in params.items()}
    return {**leaves, "cut": str(pipeline.plan.parts), "schedule": pipeline.plan.program.name}


def describe_leaves(tree: PyTree) -> dict[str, str]:
    """Return shapes and checksums of leaves in host memory or on this process's devices."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _leaf(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def check_program(name: str, lowered: jax.stages.Lowered) -> None:
    """Compare a program between the processes that run it together. All processes must call it."""
    if jax.process_count() == 1:
        return
    # The program shows differences that no other check finds, such as a constant in a layer, in the
    # loss or in the user's optimiser.
    lines = lowered.as_text().splitlines()

    def differs(count: int) -> bool:
        found = gather_numbers(
            [zlib.crc32("\n".join(lines[:count]).encode()), min(count, len(lines))]
        )
        return bool((found != found[0]).any())

    same = 0
    other = int(gather_numbers([len(lines)]).max())
    if not differs(other):
        return
    while other - same > 1:
        middle = (same + other) // 2
        same, other = (same, middle) if differs(middle) else (middle, other)
    texts = gather_texts(lines[same] if same < len(lines) else "its end")
    start = max(0, len(os.path.commonprefix(texts)) - _AROUND)
    having: dict[str, list[int]] = {}
    for process, text in enumerate(texts):
        having.setdefault(text[start : start + 2 * _AROUND].strip(), []).append(process)
    shares = "; ".join(f"{text!r} in {listed(who)}" for text, who in having.items())
    raise ConfigError(
        f"all processes must run the same program for {name}, but got in its line {same + 1}: "
        f"{shares}. A layer, the loss, the optimizer or a schedule differs between processes: "
        "build them from the same code and numbers."
    )


def _configuration(settings: TrainConfig) -> dict[str, str]:
    found: dict[str, Any] = {}

    def add(path: str, value: Any) -> None:
        if path in _OF_PROCESS_0:
            return
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                add(f"{path}.{key}" if path else str(key), inner)
        else:
            found[path] = value

    add("", asdict(without_secrets(settings)))
    return _texts(found)


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Convert values to text that is equal in all processes that run the same code."""
    return {name: _ADDRESS.sub("0x", str(value)) for name, value in values.items()}


def _struct(batch: PyTree) -> str:
    return "None" if batch is None else format_struct(struct_of(tuple(batch)))


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return f"{format_struct(leaf)} of all processes"
    value = np.asarray(leaf)
    return f"{format_struct(value)} with checksum {checksum(value):08x}"
