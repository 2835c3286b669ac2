"""Where a process finds the others."""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from _launching import ROOT
from _refusals import check_refused

import jaxpipe
from jaxpipe.distributed import (
    asks_for_determinism,
    compiler_variables,
    whole_number,
)
from jaxpipe.distributed._devices import count_gpus, warn_of_unused_devices
from jaxpipe.distributed._environment import find_job
from jaxpipe.errors import LaunchError

JAX = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
TORCH = {"MASTER_ADDR": "node0", "MASTER_PORT": "4321", "WORLD_SIZE": "8", "RANK": "5"}
LONG = "9" * 5000
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}


OURS, TORCHRUN = "the variables JAX_*", "torchrun's MASTER_ADDR, WORLD_SIZE and RANK"
IPS = "SkyPilot's SKYPILOT_NODE_IPS"
ADDRESSES: list[tuple[dict[str, str], str, tuple[Any, ...]]] = [
    (JAX, OURS, ("10.0.0.1:1234", 4, 3, None)),
    ({**JAX, "JAX_LOCAL_DEVICE_IDS": "2,3"}, OURS, ("10.0.0.1:1234", 4, 3, (2, 3))),
    (TORCH, TORCHRUN, ("node0:4321", 8, 5, None)),
    (
        {**TORCH, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
        *(TORCHRUN, ("node0:4321", 8, 5, (1,))),
    ),
    ({**TORCH, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, TORCHRUN, ("node0:4321", 8, 5, None)),
    ({**JAX, "JAX_LOCAL_DEVICE_IDS": "2, 3"}, OURS, ("10.0.0.1:1234", 4, 3, (2, 3))),
    (SKYPILOT, IPS, ("10.0.0.7:29500", 2, 1, None)),
    ({**JAX, "JAX_COORDINATOR_ADDRESS": "[::1]:7"}, OURS, ("[::1]:7", 4, 3, None)),
    ({**TORCH, "MASTER_ADDR": "fd00::1"}, TORCHRUN, ("[fd00::1]:4321", 8, 5, None)),
    ({**TORCH, "MASTER_ADDR": "[::1]"}, TORCHRUN, ("[::1]:4321", 8, 5, None)),
    (
        {**SKYPILOT, "SKYPILOT_NODE_IPS": "fe80::1%eth0\nfe80::2"},
        *(IPS, ("[fe80::1%eth0]:29500", 2, 1, None)),
    ),
    ({**TORCH, **JAX, **SLURM}, OURS, ("10.0.0.1:1234", 4, 3, None)),
]
NAMED: list[tuple[dict[str, str], str]] = [
    (SLURM, "Slurm"),
    ({"OMPI_MCA_orte_hnp_uri": "1.0;tcp://a:1", "OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
    ({"PMI_SIZE": "4", "PMI_RANK": "1"}, "mpi4py"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpi4py"),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, "Cloud TPU"),
    ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, "Cloud TPU"),
    ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_COORDINATOR_ADDRESS": "c"}, "Cloud TPU"),
    ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "0"}, "Kubernetes"),
]


def test_sources_in_their_order() -> None:
    for environ, source, place in [*ADDRESSES, *((*named, (None,) * 4) for named in NAMED)]:
        job = find_job(environ)
        assert job is not None, environ
        assert (job.source, job.is_alone) == (source, False), environ
        found = job.coordinator_address, job.num_processes, job.process_id, job.local_device_ids
        assert found == place, environ


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {"MASTER_ADDR": "site"},
        {"JAX_COORDINATOR_ADDRESS": "a:1"},
        {**SLURM, "SLURM_NTASKS": "1"},
        {"PATH": "/"},
        {"KUBERNETES_SERVICE_HOST": "h"},
        {"JOB_COMPLETION_INDEX": "0"},
        {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://a:1", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_SIZE": "1"},
    ],
)
def test_no_other_processes(environ: dict[str, str]) -> None:
    assert find_job(environ) is None


@pytest.mark.parametrize("environ", [{"WORLD_SIZE": "1", "RANK": "0"}, {"JAX_NUM_PROCESSES": "1"}])
def test_alone(environ: dict[str, str]) -> None:
    job = find_job(environ)
    assert job is not None
    assert job.is_alone


def test_a_port_that_no_variable_names_is_what_was_asked_for() -> None:
    without = {name: value for name, value in TORCH.items() if name != "MASTER_PORT"}
    for environ, address in ((without, "node0"), (SKYPILOT, "10.0.0.7")):
        for given, port in (((), 29500), ((1234,), 1234)):
            job = find_job(environ, *given)
            assert job is not None
            assert job.coordinator_address == f"{address}:{port}"
    job = find_job(TORCH, 1234)
    assert job is not None
    assert job.coordinator_address == "node0:4321"


def long(name: str) -> str:
    return rf"{name} must be a number.*\(5000 characters\)\. Set it"


ENVIRONMENTS: list[tuple[dict[str, str], str]] = [
    (
        {"JAX_NUM_PROCESSES": "4"},
        r"JAX_NUM_PROCESSES=4 without JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID\. Set what",
    ),
    (
        {"RANK": "1", "MASTER_ADDR": "a"},
        r"MASTER_ADDR=a, RANK=1 without WORLD_SIZE\. Set what is missing, or remove",
    ),
    (
        {"SKYPILOT_NUM_NODES": "2"},
        r"without SKYPILOT_NODE_IPS, SKYPILOT_NODE_RANK\. Set what is missing",
    ),
    *(
        ({**JAX, f"JAX_{name}": value}, words)
        for name, value, words in (
            ("PROCESS_ID", "4", r"JAX_PROCESS_ID .*\[0, JAX_NUM_PROCESSES=4\), .*=4\. Proc"),
            ("PROCESS_ID", "x", r"a number, but got JAX_PROCESS_ID='x'\. Set it"),
            ("LOCAL_DEVICE_IDS", "a", r"JAX_LOCAL_DEVICE_IDS must be a number, .*='a'\. Set it"),
            ("COORDINATOR_ADDRESS", "host", r"host:port, but got 'host'\. Write for instance"),
            ("COORDINATOR_ADDRESS", "::1:29500", r"'::1:29500'.*\[fd00::1\]:29500 with"),
            ("COORDINATOR_ADDRESS", f"a:{LONG}", r"host:port, .* 'a:9+'\.\.\. \(5002 char"),
            (
                "NUM_PROCESSES",
                LONG,
                r"JAX_NUM_PROCESSES='9+'\.\.\. \(5000 char.*\)\. Set it to one",
            ),
            ("PROCESS_ID", LONG, long("JAX_PROCESS_ID")),
            ("LOCAL_DEVICE_IDS", LONG, long("JAX_LOCAL_DEVICE_IDS")),
        )
    ),
    ({**TORCH, "MASTER_ADDR": "node0:1"}, r"must be host:port, but got 'node0:1:4321'\. Write"),
    ({**TORCH, "MASTER_PORT": "99999"}, r"must be host:port, but got 'node0:99999'\. Write for"),
    ({**TORCH, "MASTER_PORT": LONG}, long("MASTER_PORT")),
    ({**SLURM, "SLURM_NTASKS": LONG}, long("SLURM_NTASKS")),
]
SECOND = {"init_method": "tcp://h:1", "rank": 1, "world_size": 2}
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    (
        {"num_processes": 2},
        r"got num_processes=2 without coordinator_address, process_id\. Give all three",
    ),
    ({"rank": 1, "world_size": 2}, r"without coordinator_address\. Give all three"),
    (
        {"rank": 1, "process_id": 0},
        r"process_id and rank must say the same, but got process_id=0 and rank=1\. Give",
    ),
    (
        {"init_method": "file:///x"},
        "must be 'env://' or 'tcp://host:port' .* got init_method='file:///x'.* Give",
    ),
    ({"init_method": "tcp://h"}, r"must be host:port, but got 'h'\. Write"),
    ({**SECOND, "rank": 2}, r"must be in \[0, num_processes=2\).*process_id=2"),
    ({**SECOND, "dist_backend": "x"}, r"one of nccl.*'x'\. Leave"),
    ({**SECOND, "timeout": 0}, r"above 0 seconds.*=0\. Leave it out"),
]


def test_refused() -> None:
    check_refused(
        LaunchError,
        [
            *((words, partial(find_job, environ)) for environ, words in ENVIRONMENTS),
            *((words, partial(jaxpipe.init_distributed, **given)) for given, words in ARGUMENTS),
        ],
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {
            "dist_backend": "nccl",
            "distributed_port": 29500,
            "timeout": 30,
            "verbose": False,
            "init_method": None,
        },
        {"dist_init_required": False},
        {"world_size": 1, "rank": 0},
    ],
)
def test_deepspeed_s_defaults_never_fail(arguments: dict[str, Any]) -> None:
    job = jaxpipe.init_distributed(**arguments)
    assert job.is_alone
    assert jax.process_count() == 1


INIT = "jaxpipe.distributed._init"


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Jobs that are joined, with their timeouts; nothing is waited for."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(f"{INIT}._join", lambda *given: calls.append(given))
    for name in ("_end_soon_after_an_error", "check_devices", "warn_of_unused_devices"):
        monkeypatch.setattr(f"{INIT}.{name}", lambda: None)
    return calls


FIRST: dict[str, Any] = {"init_method": "tcp://h:1", "rank": 0, "world_size": 2}


def test_what_is_joined(joined: list[tuple[Any, ...]]) -> None:
    table: list[tuple[dict[str, Any], tuple[Any, ...], int]] = [
        ({}, ("h:1", 2, 0, None), 300),
        ({"timeout": 7.6}, ("h:1", 2, 0, None), 8),
        ({"timeout": 0.2}, ("h:1", 2, 0, None), 1),
        ({"timeout": timedelta(days=1, seconds=2)}, ("h:1", 2, 0, None), 86402),
        ({"local_device_ids": range(2)}, ("h:1", 2, 0, (0, 1)), 300),
        ({"local_device_ids": []}, ("h:1", 2, 0, ()), 300),
        ({"rank": 1, "process_id": 1}, ("h:1", 2, 1, None), 300),
    ]
    for given, place, timeout_s in table:
        job = jaxpipe.init_distributed(**{**FIRST, **given})
        found = job.coordinator_address, job.num_processes, job.process_id, job.local_device_ids
        assert found == place, given
        assert joined.pop() == (job, timeout_s, 30), given


def test_schedulers_are_asked_unless_that_is_forbidden(
    joined: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    job = jaxpipe.init_distributed(auto_mpi_discovery=False)
    assert (job.source, joined) == ("Slurm", [])
    assert jaxpipe.init_distributed().source == "Slurm"
    assert len(joined) == 1
    # What names the coordinator is no discovery.
    jaxpipe.init_distributed(**FIRST, auto_mpi_discovery=False)
    assert len(joined) == 2


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """JAX's flags that are set."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    return found


def test_collectives_between_cpus_are_those_that_are_named(
    joined: list[tuple[Any, ...]], flags: dict[str, Any]
) -> None:
    for backend, wanted in (("nccl", None), ("gloo", "gloo"), ("MPI", "mpi"), (None, None)):
        jaxpipe.init_distributed(**FIRST, dist_backend=backend)
        assert flags.pop("jax_cpu_collectives_implementation", None) == wanted, backend


def test_a_process_that_is_alone_uses_the_accelerators_that_it_is_given(
    joined: list[tuple[Any, ...]], flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "1,3")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    assert jaxpipe.init_distributed().is_alone
    assert flags.pop("jax_cuda_visible_devices") == "1,3"
    for name, value in JAX.items():
        monkeypatch.setenv(name, value)
    job = jaxpipe.init_distributed()
    assert (job.local_device_ids, flags) == ((1, 3), {})


JOIN = """
import jax, jaxpipe
jax.config.update("jax_num_cpu_devices", 1)
print(jaxpipe.init_distributed(timeout=60).coordinator_address, jax.process_count())
"""


@pytest.mark.slow
def test_processes_meet_at_an_ipv6_address() -> None:
    try:
        with socket.socket(socket.AF_INET6) as free:
            free.bind(("::1", 0))
            port = free.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")
    given = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "WORLD_SIZE": "2"}
    given |= {"MASTER_ADDR": "::1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN],
            env={**given, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outs = [process.communicate(timeout=120)[0] for process in processes]
    assert [out.splitlines()[-1] for out in outs] == [f"[::1]:{port} 2"] * 2


MODEL = """
import jaxpipe, flax.linen as nn, optax
model = jaxpipe.PipelineModule([nn.Dense(3)], num_stages=1, loss_fn=lambda y, t: y.sum())
jaxpipe.initialize(model=model, optimizer=optax.sgd(1.0), config={"train_batch_size": 2})
"""


@pytest.mark.slow
def test_a_platform_without_a_plugin(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(MODEL)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cuda",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, tmp_path / "program.py"]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    wanted = (
        "LaunchError: JAX must find devices of the platforms that it is told to use, but got "
        "JAX_PLATFORMS='cuda' and"
    )
    last = done.stderr.splitlines()[-1]
    assert wanted in last
    assert (
        "run pip install 'jaxpipe[cuda13]' or 'jaxpipe[cuda12]' where the driver is there; or set "
        "JAX_PLATF" in last
    )


def test_gpus_of_a_node(tmp_path: Path) -> None:
    assert count_gpus(tmp_path, {}) == 0
    for name in ("0000:01", "0000:02", "0000:03"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    assert count_gpus(tmp_path, {}) == 3
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "-1"}) == 0
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "0, 2"}) == 2
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}) == 3
    assert count_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}) == 1


@pytest.mark.parametrize(
    ("platform", "present", "is_told"),
    [("gpu", 4, True), ("gpu", 3, True), ("gpu", 2, False), ("cpu", 4, False)],
)
def test_gpus_that_no_process_of_a_node_uses_are_told(
    platform: str, present: int, *, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of this node use one each, and one of another node uses eight."""
    device = SimpleNamespace(platform=platform)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.setattr("jaxpipe.distributed._devices.count_gpus", lambda *_: present)
    monkeypatch.setattr(
        "jaxpipe.distributed._devices.gather_numbers",
        lambda own: np.array([own, own, [own[0] ^ 1, 8]], np.uint32),
    )
    if not is_told:
        warn_of_unused_devices()
        return
    words = f"has {present} GPUs, but its 2 processes use 2 together. .*=range\\({present}\\)"
    with pytest.warns(UserWarning, match=words):
        warn_of_unused_devices()


def test_flags_that_change_numbers_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(text: str) -> tuple[str, bool]:
        monkeypatch.setenv("XLA_FLAGS", text)
        return compiler_variables()["XLA_FLAGS"], asks_for_determinism()

    own = "--xla_dump_to=/a --xla_force_host_platform_device_count=8 --xla_cache_dir=/b"
    assert found(f"--xla_b=1 {own} --xla_a=2") == ("--xla_a=2 --xla_b=1", False)
    # Only names of flags say what they are for.
    for flag in ("--xla_mode=file_dump", "--xla_bidirectional=1", "--xla_hlo_profile"):
        assert found(flag) == (flag, False)
    name = "--xla_gpu_deterministic_ops"
    assert [found(each)[1] for each in (name, f"{name}=true", f"{name}=false")] == [
        *(True, True, False)
    ]
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert compiler_variables() == {"XLA_FLAGS": "", "NVIDIA_TF32_OVERRIDE": "0"}


def test_whole_numbers() -> None:
    most = "9" * 18
    for text, number in (
        *((most, int(most)), ("0" * 30 + "7", 7), ("0", 0), ("00", 0), ("", None), (" 1", None)),
        *(("1" + most, None), ("-1", None), ("+5", None), ("1_0", None), ("²", None), ("٣", None)),
    ):
        assert whole_number(text) == number, text
