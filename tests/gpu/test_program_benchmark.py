"""The benchmark of the GPU program: its reader of HLO on a small stored text, and that it runs."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # benchmarks are no part of the installed package

from benchmarks.gpu_program._cost import Costs, Machine  # noqa: E402
from benchmarks.gpu_program._hlo import Instruction, Module  # noqa: E402
from benchmarks.gpu_program._jobs import Job  # noqa: E402

MODULE = Module(Path(__file__).with_name("small_program.txt").read_text())
ACTIVATION, RING, WEIGHT = 64 * 128 * 2, 4 * 64 * 128 * 2, 128 * 256


def line(name: str) -> Instruction:
    return MODULE.computations["body"][name]


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("read", 2 * ACTIVATION + 4),
        ("new_ring", 2 * ACTIVATION + 4),
        ("new_sum", (4 + 2 + 4) * WEIGHT),
        ("product", ACTIVATION + 2 * WEIGHT + 64 * 256 * 2),
    ],
)
def test_slices_of_a_ring_are_read_and_written_alone(name: str, num_bytes: int) -> None:
    assert MODULE.num_bytes("body", line(name)) == num_bytes


def test_products_inside_fusions_and_half_of_causal_attention_are_counted() -> None:
    assert MODULE.flops("body", line("product")) == 2 * 64 * 128 * 256
    assert MODULE.attention_flops(line("attention")) == 4 * 2 * 64 * 64 * 32 / 2


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("read", "slices"),
        ("new_ring", "ring"),
        ("new_sum", "sums"),
        ("product", "gemm"),
        ("attention", "attention"),
    ],
)
def test_kernels_are_told_apart(name: str, category: str) -> None:
    costs = Costs(MODULE, Machine())
    assert list(costs.kernel("body", line(name)).seconds) == [category]
    assert list(costs.kernel("idle", MODULE.computations["idle"]["zeros.5"]).seconds) == ["packed"]


def test_loops_branches_and_collectives_are_read() -> None:
    (loop,) = MODULE.loops()
    assert (loop.body, loop.trip_count) == ("body", 5)
    assert line("branch").branches == ("idle", "loss")
    assert line("send").pairs == ((0, 1), (1, 2))
    assert not line("send").is_sync
    assert MODULE.computations["main"]["reduced"].group == (0, 2, 4, 6)
    assert "Head_0" in MODULE.scopes("body")


def test_a_tick_takes_its_longest_branch_and_its_exchange() -> None:
    machine = Machine().ideal
    cost = Costs(MODULE, machine).straight("body", 3)
    assert cost.seconds["packed"] == pytest.approx((2 * ACTIVATION + 4 * 2097152) / machine.memory)
    assert cost.seconds["exchange"] == pytest.approx(ACTIVATION / machine.wire)
    assert cost.flops["gemm"] == 2 * 64 * 128 * 256


def test_operations_of_a_step_are_counted_as_published() -> None:
    job = Job("1f1b")
    block = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 11008
    token = 6 * (32 * block + 32768 * 4096) + 12 * 32 * 4096 * 4096
    assert job.flops == 32 * 4096 * token


@pytest.mark.gpu_aot
@pytest.mark.skipif(
    not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))), reason="needs the CUDA plugin"
)
def test_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.gpu_program", "--smoke", "--json", str(path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, capture_output=True, timeout=300)
    found = json.loads(path.read_text())["1f1b"]
    assert found["total_gb"] > 0
    assert math.isfinite(found["real"]["step_ms"])
    assert found["real"]["middle"]["tflop"]["gemm"] > 0
    assert found["ideal"]["step_ms"] < found["real"]["step_ms"]
