"""Manifests for Kubernetes."""

import json
import re
from typing import Any

from jaxpipe.errors import LaunchError

from ._cluster import ClusterJob
from ._variables import RESTART

_INDEX = "JOB_COMPLETION_INDEX"
_RESTARTS = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
_LAST_SECONDS = 10.0


def kubernetes_manifest(job: ClusterJob) -> str:
    """Write an Indexed Job with a headless Service.

    There is one pod per node, in which the launcher starts the processes. The pods find the first
    pod by its name. A pod that fails ends the Job.

    Args:
        job: The job.

    Returns:
        The text of the manifest, with two documents.

    Raises:
        LaunchError: The job has no image, has restarts, or has an argument that is not valid
            Unicode.
    """
    _check(job)
    if job.max_restarts:
        raise LaunchError(
            "an Indexed Job must not restart, because it would restart single pods and not all, "
            f"but got max_restarts={job.max_restarts}. Write a JobSet, which restarts all pods."
        )
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": job.name},
        },
    }
    pod = _pod(job, f"{job.name}-0.{job.name}:{job.fixed_port}")
    pod["subdomain"] = job.name
    documents = [
        service,
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job.name},
            "spec": _job_spec(job, pod),
        },
    ]
    return _header(job, "kubernetes", "A pod that fails ends the Job") + "---\n".join(
        map(_document, documents)
    )


def jobset_manifest(job: ClusterJob) -> str:
    """Write a JobSet, which restarts all pods when one fails.

    The cluster must have JobSet installed. `JAXPIPE_RESTART` counts the restarts.

    Args:
        job: The job.

    Returns:
        The text of the manifest.

    Raises:
        LaunchError: The job has no image, or has an argument that is not valid Unicode.
    """
    _check(job)
    pod = _pod(job, f"{job.name}-workers-0-0.{job.name}:{job.fixed_port}", _RESTARTS)
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": job.max_restarts},
            "replicatedJobs": [
                {"name": "workers", "replicas": 1, "template": {"spec": _job_spec(job, pod)}}
            ],
        },
    }
    what = f"All pods restart when one fails, at most {job.max_restarts} times"
    return _header(job, "jobset", what) + _document(jobset)


def _document(value: Any) -> str:
    """A document in JSON, which is valid YAML once some characters are escaped."""

    def written(found: re.Match[str]) -> str:
        number = ord(found[0])
        if found[0].isprintable():
            return found[0]
        return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"

    return re.sub(r"[^\n -~]", written, json.dumps(value, indent=2, ensure_ascii=False)) + "\n"


def _literal(text: str) -> str:
    """A word or value in which Kubernetes does not replace `$(NAME)` by a variable."""
    return text.replace("$", "$$")


def _check(job: ClusterJob) -> None:
    for text in job.texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise LaunchError(
                f"the texts of a job for Kubernetes must be Unicode text, but got {text!r}. Use "
                "other names."
            ) from error
    if job.image is None:
        raise LaunchError(
            "a job for Kubernetes must have a container image, but got image=None. "
            "Give --image with one that has jaxpipe and the program."
        )


def _header(job: ClusterJob, kind: str, what: str) -> str:
    return (
        f"# {job.summary[0].upper()}{job.summary[1:]}; one pod per node. Start with: kubectl apply "
        f"-f FILE\n# {what}.\n# The program loads the last checkpoint (engine.load_checkpoint), "
        "and saves at SIGTERM if it calls\n# engine.save_on_preemption.\n# Written by: jaxpipe "
        f"launch --write {kind} {job.options}\n"
    )


def _job_spec(job: ClusterJob, pod: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        "backoffLimit": 0,
    }
    if job.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = job.time_limit_s
    return {**spec, "template": {"spec": pod}}


def _pod(job: ClusterJob, coordinator: str, restarts: str | None = None) -> dict[str, Any]:
    # The launcher must end the processes before Kubernetes ends the launcher.
    grace_s = max(job.grace_s - _LAST_SECONDS, 0.0)
    resources: dict[str, Any] = {"limits": {"nvidia.com/gpu": job.gpus_per_node}}
    if job.cpus_per_process is not None:
        resources["requests"] = {"cpu": job.cpus_per_process * job.processes_on_node}
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if job.claim_and_path is not None:
        claim, path = job.claim_and_path
        mounts.append({"name": "checkpoints", "mountPath": path})
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}})
    env: list[dict[str, Any]] = [
        {"name": name, "value": _literal(value)} for name, value in job.variables.items()
    ]
    if restarts is not None:
        env.append({"name": RESTART, "valueFrom": {"fieldRef": {"fieldPath": restarts}}})
    container: dict[str, Any] = {
        "name": "train",
        "image": job.image,
        "command": list(map(_literal, job.node_words(f"@{_INDEX}", coordinator, grace_s))),
        **({"env": env} if env else {}),
        "ports": [{"containerPort": job.fixed_port}],
        "resources": resources,
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(round(job.grace_s), 1),
        "containers": [container],
        "volumes": volumes,
    }
