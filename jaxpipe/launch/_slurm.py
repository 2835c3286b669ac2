"""A job file for Slurm."""

from jaxpipe.errors import LaunchError

from ._cluster import ClusterJob
from ._shell import joined, quoted
from ._variables import MODULE_LOADING

_CONTINUED = " \\\n  "


def slurm_script(job: ClusterJob) -> str:
    """Write a file for `sbatch`.

    There is one task per process. The processes find each other through `JAX_COORDINATOR_ADDRESS`,
    `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. With a stall timeout there is one task per node: a
    launcher, which starts the processes there and watches them. The tasks receive SIGTERM `grace_s`
    before the time limit.

    Args:
        job: The job.

    Returns:
        The text of the file.

    Raises:
        LaunchError: The job has restarts or a volume.

    Example:
        >>> from jaxpipe.launch import ClusterJob, Program
        >>> job = ClusterJob(Program("train.py", ("--steps", "1000")), num_nodes=2, gpus_per_node=8)
        >>> slurm_script(job).splitlines()[0]
        '#!/bin/bash'
    """
    if job.max_restarts:
        raise LaunchError(
            "a job file for Slurm must ask for no restarts, because Slurm itself restarts a job if "
            f"a node fails, but got max_restarts={job.max_restarts}. Leave it out; to continue "
            "after an error, submit it several times with sbatch --dependency=singleton."
        )
    if job.volume is not None:
        raise LaunchError(
            "a job file for Slurm must have no volume claim, which is for Kubernetes, but got "
            f"volume={job.volume!r}. Leave it out, and keep checkpoints in a folder that is shared "
            "by all nodes."
        )
    tasks = 1 if job.stall_timeout_s is not None else job.processes_on_node
    parts = [
        "#!/bin/bash",
        *_header(job),
        *_directives(job, tasks),
        "# shellcheck disable=SC2016  # text in single quotes is not for this shell",
        "set -euo pipefail",
        "",
        *_checks(job, tasks),
        *_variables(job),
        "# A task that fails ends the others. Every task sees all GPUs of its node, and uses "
        "those assigned to it.",
        *_step(job),
    ]
    return "\n".join(parts) + "\n"


def _header(job: ClusterJob) -> list[str]:
    return [
        f"# {job.summary[0].upper()}{job.summary[1:]}. Submit with: sbatch FILE",
        "# Slurm restarts the job when a node fails or the job is preempted. The program must load "
        "its last checkpoint",
        "# (engine.load_checkpoint). It saves at SIGTERM if it calls engine.save_on_preemption.",
        "# To continue after the time limit, submit the file several times with: sbatch "
        "--dependency=singleton FILE",
        f"# Written by: jaxpipe launch --write slurm {job.options}",
    ]


def _directives(job: ClusterJob, tasks: int) -> list[str]:
    cpus = job.cpus_per_process
    options = {
        "job-name": job.name,
        "nodes": job.num_nodes,
        "ntasks-per-node": tasks,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": None if cpus is None else cpus * job.processes_on_node // tasks,
        "time": job.time_limit,
        "signal": f"TERM@{round(job.grace_s)}",
        "output": "%x-%j.out",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    return [*lines, "#SBATCH --requeue", ""]


def _checks(job: ClusterJob, tasks: int) -> list[str]:
    expected = job.num_nodes * tasks
    lines = [
        'if [ "${SLURM_JOB_NUM_NODES:-0}" -ne '
        + f'{job.num_nodes} ] || [ "${{SLURM_NTASKS:-0}}" -ne {expected} ]; then',
        f'  echo "This file must be submitted with sbatch for {job.num_nodes} nodes and {expected} '
        "tasks, but got " + '${SLURM_JOB_NUM_NODES:-no} nodes and ${SLURM_NTASKS:-no} tasks." >&2',
        "  exit 2",
        "fi",
    ]
    if job.program.kind == "script" and job.image is None:
        lines += [
            f"program={quoted(job.program.name)}",
            'if [ ! -f "$program" ]; then',
            '  echo "There is no $program in $PWD. Submit from its folder." >&2',
            "  exit 2",
            "fi",
        ]
    return [*lines, ""]


def _variables(job: ClusterJob) -> list[str]:
    port = "$((20000 + SLURM_JOB_ID % 10000))" if job.port is None else str(job.port)
    lines = [
        'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f'export JAX_COORDINATOR_ADDRESS="${{nodes%%[[:space:]]*}}:{port}"',
    ]
    if job.stall_timeout_s is None:
        lines.append('export JAX_NUM_PROCESSES="$SLURM_NTASKS"')
    lines.append('export JAXPIPE_RESTART="${SLURM_RESTART_COUNT:-0}"')
    lines.append(f'export {MODULE_LOADING}="${{{MODULE_LOADING}:-EAGER}}"')
    lines += [f"export {name}={quoted(value)}" for name, value in job.variables.items()]
    return [*lines, ""]


def _step(job: ClusterJob) -> list[str]:
    options = ["srun", "--kill-on-bad-exit=1", "--gpu-bind=none"]
    if job.cpus_per_process is not None:
        options.append('--cpus-per-task="$SLURM_CPUS_PER_TASK"')
    if job.image is not None:
        options += [
            f"--container-image={quoted(job.image)}",
            '--container-mounts="$PWD:$PWD"',
            '--container-workdir="$PWD"',
        ]
    if job.stall_timeout_s is not None:
        address = "JAX_COORDINATOR_ADDRESS"
        words = job.node_words("@SLURM_NODEID", address, job.grace_s)
        shown = [f'"${address}"' if word == address else quoted(word) for word in words]
        return [_CONTINUED.join([" ".join([*options, "--cpu-bind=none"]), " ".join(shown)])]
    each = job.gpus_per_node // job.processes_on_node
    first = "SLURM_LOCALID" if each == 1 else f"SLURM_LOCALID * {each}"
    devices = (
        '"$SLURM_LOCALID"' if each == 1 else f'"$(seq -s, $(({first})) $(({first} + {each - 1})))"'
    )
    task = f'JAX_PROCESS_ID="$SLURM_PROCID" JAX_LOCAL_DEVICE_IDS={devices} exec "$@"'
    program = joined(job.program.words(job.python))
    return [
        _CONTINUED.join([" ".join([*options, "--label"]), f"bash -c '{task}' task", program]),
    ]
