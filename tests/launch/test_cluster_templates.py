"""The templates of jobs for schedulers: what the schedulers' own checks say of them."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from _launching import ROOT

from jaxpipe.launch._options import read_options

yaml = pytest.importorskip("yaml")

TEMPLATES = ROOT / "examples" / "cluster"
ENTRY = ["/work/.venv/bin/python", "-u", "-m", "jaxpipe.launch"]


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((TEMPLATES / name).read_text()))


def _check_job(document: dict[str, Any], coordinator: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(document, validate.latest_version(), strict=True)
    spec = document["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    assert container["command"][: len(ENTRY)] == ENTRY
    args = read_options(container["command"][len(ENTRY) :], "jaxpipe launch")
    assert (args.coordinator, args.node_rank) == (coordinator, "@JOB_COMPLETION_INDEX")
    assert args.num_nodes == spec["completions"] == spec["parallelism"]
    assert args.num_gpus == container["resources"]["limits"]["nvidia.com/gpu"]
    assert args.grace < pod["terminationGracePeriodSeconds"]
    names = {each["name"] for each in pod["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == names
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["JAX_COMPILATION_CACHE_DIR"] == mounted["cache"]


def test_a_job_and_its_service() -> None:
    service, job = _documents("job.yaml")
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(service, validate.latest_version(), strict=True)
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    _check_job(job, f"{name}-0.{name}:29500")


def test_a_jobset() -> None:
    [jobset] = _documents("jobset.yaml")
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert "kueue.x-k8s.io/queue-name" in jobset["metadata"]["labels"]
    [workers] = jobset["spec"]["replicatedJobs"]
    name = jobset["metadata"]["name"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
    _check_job({**job, **workers["template"]}, f"{name}-{workers['name']}-0-0.{name}:29500")
    [container] = workers["template"]["spec"]["template"]["spec"]["containers"]
    [restart] = [each for each in container["env"] if each["name"] == "JAXPIPE_RESTART"]
    assert "restart-attempt" in restart["valueFrom"]["fieldRef"]["fieldPath"]


def test_a_task_in_slurm(tmp_path: Path) -> None:
    """Run as Slurm would, with an srun that runs one task here and shows what it was given."""
    template = TEMPLATES / "job.sbatch"
    subprocess.run(["bash", "-n", str(template)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(template)], check=True)
    for name, text in {
        "scontrol": "printf 'node7\\nnode8\\n'\n",
        "srun": 'while [[ "$1" == --* ]]; do echo "option $1"; shift; done\n'
        'SLURM_PROCID=5 SLURM_LOCALID=5 exec "$@"\n',
        "python": 'env | grep ^JAX | sort; printf "word %s\\n" "$@"\n',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "USER": "somebody",
        "SLURM_JOB_ID": "31234",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NTASKS": "16",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_RESTART_COUNT": "2",
    }
    done = subprocess.run(
        ["bash", str(template)], env=variables, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert "option --kill-on-bad-exit=1" in lines
    assert [line for line in lines if line.startswith("JAX")] == [
        "JAXPIPE_RESTART=2",
        "JAX_COMPILATION_CACHE_DIR=/var/tmp/somebody-jax",
        "JAX_COORDINATOR_ADDRESS=node7:21234",
        "JAX_LOCAL_DEVICE_IDS=5",
        "JAX_NUM_PROCESSES=16",
        "JAX_PROCESS_ID=5",
    ]
    assert lines[-4:] == ["word -u", "word train.py", "word --deepspeed_config", "word config.json"]


@pytest.mark.parametrize("name", ["job.sbatch", "job.yaml", "jobset.yaml"])
def test_what_differs_between_clusters_is_marked(name: str) -> None:
    assert (TEMPLATES / name).read_text().count("# CHANGE: ") >= 3
