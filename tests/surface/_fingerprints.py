"""Lowered training steps as hashes, which a change of structure leaves as they are."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import numpy as np

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "parity"), str(TESTS / "gpu")]

import _h200  # noqa: E402
import test_gpu_attention  # noqa: E402
import test_gpu_experts  # noqa: E402
import test_gpu_fsdp  # noqa: E402
import test_gpu_program  # noqa: E402
import test_gpu_sharding  # noqa: E402
import test_gradients  # noqa: E402
from _covering import first_values_then_pairs  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

from jaxpipe import Pipeline  # noqa: E402

JOBS: dict[str, tuple[ModuleType, Callable[[], Any]]] = {
    "language model": (test_gpu_program, test_gpu_program.language_model),
    "split vocabulary": (test_gpu_program, lambda: test_gpu_program.split_vocabulary(1)),
    "experts": (test_gpu_experts, test_gpu_experts.step_of),
    "fsdp": (test_gpu_fsdp, lambda: test_gpu_fsdp.step_of("tick")),
    "attention": (test_gpu_attention, test_gpu_attention.step_of),
    "model axis": (test_gpu_sharding, test_gpu_sharding.step_of),
}


def cases() -> Iterator[tuple[str, Callable[[], Pipeline]]]:
    """The parity suite's cases."""
    for table in (
        (test_gradients.LAYOUTS, lambda _: True, test_gradients.to_fitting),
        (test_gradients.FACTORS, test_gradients.is_valid, test_gradients.to_case),
    ):
        for each in first_values_then_pairs(*table):
            case = getattr(each, "values", [each])[0]
            yield str(case), case.pipeline


def jobs() -> Iterator[tuple[str, Callable[[], Pipeline]]]:
    """Those that are compiled for GPUs, here for as many CPU devices."""
    for name, job in JOBS.items():
        yield name, partial(_pipeline_of, *job)


def fingerprint(pipeline: Pipeline) -> str:
    lowered = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct)
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]


class _Built(Exception):  # noqa: N818  # ends a job as soon as its pipeline is there
    pass


def _pipeline_of(module: ModuleType, job: Callable[[], Any]) -> Pipeline:
    built: list[Pipeline] = []

    def build(*args: Any, **settings: Any) -> None:
        built.append(_h200.build(*args, **settings))
        raise _Built

    with mock.patch.multiple(module, build=build, h200_mesh=_mesh), suppress(_Built):
        job()
    return built[0]


def _mesh(stages: int, data: int, hosts: int = 1, **sizes: int) -> Mesh:
    shape = {"stage": stages, "data": data, **sizes}
    shape = {k: n for k, n in shape.items() if n > 1 or k in ("stage", "data")}
    devices = np.array(jax.devices()[: np.prod([*shape.values()])])
    return Mesh(
        devices.reshape(*shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape)
    )
