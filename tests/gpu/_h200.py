"""Pipelines compiled for H200s that are not there."""

import functools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import optax
from _settings import make_settings
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import jaxpipe
from jaxpipe import Pipeline, PipelineModule
from jaxpipe.core.executor import without_cache

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks are no part of the installed package

from _hlo import Program  # noqa: E402

from benchmarks._launches import Launches, steady_launches  # noqa: E402
from jaxpipe.programs.compiled import DUMP_OPTION  # noqa: E402

TARGET = Path(jaxpipe.__file__).parent / "tools" / "plan" / "h200_target.txtpb"


@functools.cache
def h200_mesh(
    stages: int, data: int, hosts: int = 1, *, model: int = 1, fsdp: int = 1, expert: int = 1
) -> Mesh:
    """A mesh of GPUs that can be compiled for, `hosts` computers of equally many."""
    description = topologies.get_topology_desc(
        platform="cuda",
        topology=f"1x{hosts}x{stages * data * model * fsdp * expert // hosts}",
        target_config=TARGET.read_text(),
    )
    shape = {"stage": stages, "data": data} | ({"model": model} if model > 1 else {})
    shape |= {"fsdp": fsdp} if fsdp > 1 else {}
    shape |= {"expert": expert} if expert > 1 else {}
    devices = np.array(description.devices).reshape(*shape.values())
    return Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def build(
    module: PipelineModule, mesh: Mesh, example: Any, microbatches: int = 8, **settings: Any
) -> Pipeline:
    return Pipeline(
        module, optax.adam(1e-3), mesh, example, microbatches, make_settings(**settings)
    )


def compile_step(pipeline: Pipeline, **options: Any) -> jax.stages.Compiled:
    with without_cache():
        lowered = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct)
        return lowered.compile(compiler_options=options or None)


@dataclass(frozen=True)
class Step:
    """A compiled step."""

    pipeline: Pipeline
    program: Program
    memory: Any
    launches: Launches

    @classmethod
    def of(cls, pipeline: Pipeline) -> Self:
        with tempfile.TemporaryDirectory() as folder:
            compiled = compile_step(pipeline, **{DUMP_OPTION: folder})
            program = Program(compiled.as_text() or "")
            launches = steady_launches(Path(folder), program)
        return cls(pipeline, program, compiled.memory_analysis(), launches)

    @property
    def steady(self) -> list[Any]:
        """The loop in which most is sent, and most computed."""
        return max(self.program.bodies(), key=len)
