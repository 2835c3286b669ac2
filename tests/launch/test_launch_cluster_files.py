"""The files for schedulers: what is in them, and what the schedulers' own checks say of them."""

import os
import random
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _launching import ROOT, launch

from jaxpipe.errors import LaunchError
from jaxpipe.launch import ClusterJob, Program, jobset_manifest, kubernetes_manifest, slurm_script

yaml = pytest.importorskip("yaml")

EXAMPLES = sorted((ROOT / "examples" / "cluster").iterdir())
TRAIN = Program("train.py", ("--deepspeed_config", "my config.json"))
JOBS = {
    "plain": ClusterJob(TRAIN, 2, 8),
    "one-node": ClusterJob(TRAIN, 1, 1, name="a", port=1234, grace_s=30),
    "per-node": ClusterJob(
        TRAIN, 4, 8, processes_per_node=1, cpus_per_process=32, time_limit="1-00:00:00"
    ),
    "shared": ClusterJob(TRAIN, 4, 8, processes_per_node=2, image="registry:5000/a/b:c"),
    "watched": ClusterJob(TRAIN, 2, 8, stall_timeout_s=600, cpus_per_process=4, image="b"),
    "module": ClusterJob(
        Program("pkg.train", ("it's",), "module"), 2, 2, variables={"A": "b 'c' $d"}, python="py 3"
    ),
    "command": ClusterJob(
        Program("./train", (), "command"), 2, 2, processes_per_node=1, stall_timeout_s=1.5
    ),
}
each_job = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())


def _with_image(job: ClusterJob, **changes: Any) -> ClusterJob:
    return ClusterJob(**{**vars(job), "image": "registry.example.com/a:b", **changes})


def _check_shell(folder: Path, text: str, *options: str) -> None:
    path = folder / "job.sbatch"
    path.write_text(text)
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shutil.which("shellcheck"):
        found = subprocess.run(
            ["shellcheck", *options, str(path)], capture_output=True, text=True, check=False
        )
        assert found.stdout == ""


def _run_in_slurm(folder: Path, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the file as Slurm would.

    Its srun runs one task here and says what it was given.
    """
    (folder / "scontrol").write_text("#!/bin/sh\nprintf 'node7\\nnode8\\n'\n")
    (folder / "srun").write_text(
        '#!/bin/bash\nwhile [[ "$1" == --* ]]; do echo "option $1"; shift; done\n'
        'SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NODEID=1 exec "$@"\n'
    )
    show = '#!/bin/bash\nenv | grep ^JAX | sort; printf "word %s\\n" "$@"\n'
    for name in ("python", "py 3"):
        (folder / name).write_text(show)
    for name in ("scontrol", "srun", "python", "py 3"):
        (folder / name).chmod(0o755)
    (folder / "train.py").touch()
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "31234",
        "SLURM_JOB_NODELIST": "node[7-8]",
    }
    return subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_what_the_launcher_writes(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = path.read_text()
    [command] = re.findall(r"^# Written by: jaxpipe launch (.*)$", text, re.MULTILINE)
    assert launch(*shlex.split(command)) == 0
    assert capfd.readouterr().out == text


def test_there_is_an_example_of_each_kind() -> None:
    assert [path.name for path in EXAMPLES] == ["job.sbatch", "job.yaml", "jobset.yaml"]


@each_job
def test_the_header_gives_the_file_again(
    job: ClusterJob, capfd: pytest.CaptureFixture[str]
) -> None:
    text = slurm_script(job)
    [command] = re.findall(r"^# Written by: jaxpipe launch (.*)$", text, re.MULTILINE)
    assert launch(*shlex.split(command)) == 0
    assert capfd.readouterr().out == text


@each_job
def test_shells_take_the_slurm_file(job: ClusterJob, tmp_path: Path) -> None:
    _check_shell(tmp_path, slurm_script(job))


def test_directives() -> None:
    lines = [
        line for line in slurm_script(JOBS["per-node"]).splitlines() if line.startswith("#SBATCH")
    ]
    assert lines == [
        "#SBATCH --job-name=jaxpipe",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=32",
        "#SBATCH --time=1-00:00:00",
        "#SBATCH --signal=TERM@120",
        "#SBATCH --output=%x-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
    ]
    assert "--ntasks-per-node=8\n" in slurm_script(JOBS["plain"])
    watched = slurm_script(JOBS["watched"])
    assert "--ntasks-per-node=1\n" in watched
    assert "--cpus-per-task=32\n" in watched


@pytest.mark.parametrize(
    ("name", "tasks", "devices"),
    [
        ("plain", 16, "1"),
        ("per-node", 4, "8,9,10,11,12,13,14,15"),
        ("shared", 8, "4,5,6,7"),
        ("module", 4, "1"),
    ],
)
def test_a_task_in_slurm(tmp_path: Path, name: str, tasks: int, devices: str) -> None:
    job = JOBS[name]
    counts = {"SLURM_JOB_NUM_NODES": str(job.num_nodes), "SLURM_NTASKS": str(tasks)}
    done = _run_in_slurm(
        tmp_path, slurm_script(job), **counts, SLURM_CPUS_PER_TASK="32", SLURM_RESTART_COUNT="2"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "option --kill-on-bad-exit=1" in lines
    assert [line for line in lines if line.startswith("JAX")] == [
        "JAXPIPE_RESTART=2",
        "JAX_COORDINATOR_ADDRESS=node7:21234",
        f"JAX_LOCAL_DEVICE_IDS={devices}",
        f"JAX_NUM_PROCESSES={tasks}",
        "JAX_PROCESS_ID=5",
    ]
    assert [line[5:] for line in lines if line.startswith("word ")] == list(job.program.words(""))[
        1:
    ]


def test_a_watched_task_is_the_launcher(tmp_path: Path) -> None:
    counts = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "32"}
    done = _run_in_slurm(tmp_path, slurm_script(JOBS["watched"]), **counts)
    assert done.returncode == 0, done.stderr
    assert [line[5:] for line in done.stdout.splitlines() if line.startswith("word ")] == [
        *(
            "-u",
            "-m",
            "jaxpipe.launch",
            "--num_nodes",
            "2",
            "--num_gpus",
            "8",
            "--node-rank",
            "@SLURM_NODEID",
        ),
        *("--coordinator", "node7:21234", "--grace", "120", "--stall-timeout", "600"),
        *("train.py", "--deepspeed_config", "my config.json"),
    ]
    assert "option --container-image=b" in done.stdout
    assert f"option --container-workdir={tmp_path}" in done.stdout


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {},
            "must be submitted with sbatch for 2 nodes and 16 tasks, but got no nodes and no "
            "tasks.",
        ),
        (
            {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "8"},
            "2 nodes and 16 tasks, but got 1 nodes and 8 tasks.",
        ),
    ],
    ids=["not-submitted", "too-few"],
)
def test_the_slurm_file_checks_its_nodes(
    tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    done = _run_in_slurm(tmp_path, slurm_script(JOBS["plain"]), **variables)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_slurm_file_checks_its_program(tmp_path: Path) -> None:
    job = ClusterJob(Program("gone $1.py"), 2, 8)
    done = _run_in_slurm(tmp_path, slurm_script(job), SLURM_JOB_NUM_NODES="2", SLURM_NTASKS="16")
    assert done.returncode == 2
    assert f"There is no gone $1.py in {tmp_path}. Submit from its folder." in done.stderr


NASTY = [
    *(
        "",
        " ",
        "a b",
        "it's",
        '"',
        "\\",
        "\\n",
        "a\\",
        "$",
        "$$",
        "$HOME",
        "$(touch pwned)",
        "`touch pwned`",
        "${X}",
        "!!",
        "~",
        "*",
    ),
    *(
        "\n",
        "a\ntouch pwned\n",
        "\n#SBATCH --wrap=x",
        "\r\n",
        "\r",
        "\t",
        "\x0b",
        "\x0c",
        "\x1b[31m",
        "\x7f",
        "\x85b",
        "\u2028b",
    ),
    *(
        "\u2029c",
        "\ufeff",
        "\u200b",
        "\xa0",
        "caf\u00e9",
        "\U0001f600",
        "\U000e0001",
        "\uffff",
        "; touch pwned",
        "&& touch pwned",
    ),
    *(
        "---",
        "- a: b",
        "\n---\na: b",
        "#",
        "a #b",
        ": ",
        "{",
        "]",
        "%",
        "@",
        "null",
        "yes",
        "1e3",
        "$(JOB_COMPLETION_INDEX)",
        "$$(A)",
    ),
    *("-x", "--", "=", "a=b", "'\n'", "$'\\n'", "\\x41", "\x01" + "9"),
]


def _nasty_job(seed: int, letters: str) -> ClusterJob:
    """A job whose every free text is drawn from what shells and YAML take amiss."""
    draw = random.Random(seed)
    words = [*NASTY, *("".join(draw.choices(letters, k=draw.randrange(12))) for _ in range(200))]
    draw.shuffle(words)
    variables = {f"V{i}": draw.choice(words) for i in range(20)}
    name = "p" + "".join(draw.choices(letters.replace("/", ""), k=6))
    python = "/opt/a b/" + "".join(draw.choices(letters, k=6))
    image = "r/" + "".join(draw.choices(letters, k=6))
    return ClusterJob(
        Program(name, tuple(words)), 2, 2, variables=variables, python=python, image=image
    )


LETTERS = (
    "ab01 \n\r\t'\"`$(){}[]<>|&;#!*?~\\/%@:,-=^_"
    "\x00\x01\x1b\x7f\x85\u2028\ufeff\u00e9\U0001f600\U000e0001"
).replace("\x00", "")
BYTES = LETTERS + "\udcff\udc80"  # as Python has the bytes of arguments that are no text


def _split(text: str, folder: Path) -> list[str]:
    """The words that bash makes of a line."""
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {text}"], cwd=folder, stdout=subprocess.PIPE, check=True
    )
    return os.fsdecode(done.stdout).split("\0")[:-1]


@pytest.mark.parametrize("seed", range(3))
def test_no_argument_leaves_its_place_in_the_slurm_file(tmp_path: Path, seed: int) -> None:
    job = _nasty_job(seed, BYTES)
    text = slurm_script(job)
    # Without its advice on words that look like slips, such as "A==b" for a variable's value "=b".
    _check_shell(tmp_path, text, "--severity=error", "--exclude=SC1097")
    head = text.splitlines()[: text.split("\n").index("set -euo pipefail")]
    assert all(line.startswith("#") or not line for line in head)
    assert len(head) == len(slurm_script(ClusterJob(TRAIN, 2, 2)).split("set -euo")[0].splitlines())
    [command] = re.findall(r"^# Written by: jaxpipe launch (.*)$", text, re.MULTILINE)
    assert _split(command, tmp_path)[-len(job.program.args) - 1 :] == [
        job.program.name,
        *job.program.args,
    ]
    # An srun that notes what it is given, and starts nothing.
    for name, body in (
        ("scontrol", "echo a"),
        ("srun", 'printf "%s\\0" "$@" > given; env -0 > variables'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / job.program.name).touch()
    slurm = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST": "a",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "4",
    }
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm}
    subprocess.run(
        ["bash", str(tmp_path / "job.sbatch")], cwd=tmp_path, env=environment, check=True
    )
    given = os.fsdecode((tmp_path / "given").read_bytes()).split("\0")[:-1]
    assert given[given.index("task") + 1 :] == list(job.program.words(job.python))
    assert f"--container-image={job.image}" in given
    variables = dict(
        line.split("=", 1)
        for line in os.fsdecode((tmp_path / "variables").read_bytes()).split("\0")[:-1]
    )
    assert {name: variables[name] for name in job.variables} == job.variables
    assert not (tmp_path / "pwned").exists()


def _expanded(text: str) -> str:
    """What a kubelet makes of a word: `$$` is `$`, and `$(NAME)` a variable's value."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[0] == "$$" else f"<{found[1]}>", text
    )


@pytest.mark.parametrize("make", [kubernetes_manifest, jobset_manifest])
@pytest.mark.parametrize("seed", range(3))
def test_no_argument_leaves_its_place_in_a_manifest(
    tmp_path: Path, seed: int, make: Callable[[ClusterJob], str]
) -> None:
    job = _nasty_job(seed, LETTERS)
    text = make(job)
    *_, document = documents = list(yaml.safe_load_all(text))
    plain = make(ClusterJob(**{**vars(job), "program": TRAIN, "variables": {"A": "b"}}))
    assert len(documents) == len(list(yaml.safe_load_all(plain)))
    spec = (
        document["spec"]
        if make is kubernetes_manifest
        else document["spec"]["replicatedJobs"][0]["template"]["spec"]
    )
    [container] = spec["template"]["spec"]["containers"]
    command = [_expanded(word) for word in container["command"]]
    assert command[0] == job.python
    assert command[-len(job.program.args) - 1 :] == [job.program.name, *job.program.args]
    env = {each["name"]: _expanded(each["value"]) for each in container["env"] if "value" in each}
    assert env == job.variables
    assert container["image"] == job.image
    [line] = re.findall(r"^# Written by: jaxpipe launch (.*)$", text, re.MULTILINE)
    assert _split(line, tmp_path)[-len(job.program.args) - 1 :] == [
        job.program.name,
        *job.program.args,
    ]


def test_what_no_file_can_hold() -> None:
    with pytest.raises(
        LaunchError, match=r"must hold no zero byte, but got 'a\\x00b'\. Leave it out"
    ):
        ClusterJob(Program("a\0b"), 1, 1)
    with pytest.raises(
        LaunchError, match=r"must be Unicode text, but got '\\udcff'\. Use other names"
    ):
        kubernetes_manifest(ClusterJob(Program("a", ("\udcff",)), 1, 1, image="b"))


def _check_job(documents: list[dict[str, Any]]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents:
        validate.validate(document, validate.latest_version(), strict=True)


@each_job
def test_kubernetes_takes_the_manifest(job: ClusterJob) -> None:
    service, indexed = documents = list(yaml.safe_load_all(kubernetes_manifest(_with_image(job))))
    _check_job(documents)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": indexed["metadata"]["name"]}
    spec = indexed["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == (
        "Indexed",
        job.num_nodes,
        job.num_nodes,
    )
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    [container] = pod["containers"]
    command = container["command"]
    coordinator = command[command.index("--coordinator") + 1]
    assert coordinator == f"{job.name}-0.{job.name}:{job.fixed_port}"
    assert command[command.index("--node-rank") + 1] == "@JOB_COMPLETION_INDEX"
    assert command[-len(job.program.options()) :] == list(job.program.options())
    assert container["resources"]["limits"] == {"nvidia.com/gpu": job.gpus_per_node}
    grace_s = float(command[command.index("--grace") + 1])
    assert grace_s < pod["terminationGracePeriodSeconds"] == job.grace_s
    assert {each["name"]: _expanded(each["value"]) for each in container.get("env", [])} == dict(
        job.variables
    )


@each_job
def test_jobset_takes_the_manifest(job: ClusterJob) -> None:
    [jobset] = yaml.safe_load_all(jobset_manifest(_with_image(job, max_restarts=3)))
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 3}
    [workers] = jobset["spec"]["replicatedJobs"]
    template = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "a"},
        **workers["template"],
    }
    _check_job([template])
    [container] = template["spec"]["template"]["spec"]["containers"]
    command = container["command"]
    name = jobset["metadata"]["name"]
    assert command[command.index("--coordinator") + 1].startswith(
        f"{name}-{workers['name']}-0-0.{name}:"
    )
    [restart] = [each for each in container["env"] if each["name"] == "JAXPIPE_RESTART"]
    assert "restart-attempt" in restart["valueFrom"]["fieldRef"]["fieldPath"]


def test_volumes_and_limits() -> None:
    job = _with_image(
        JOBS["shared"], volume="claim-1:/ckpt", time_limit="1-01:00:01", cpus_per_process=4
    )
    _, indexed = yaml.safe_load_all(kubernetes_manifest(job))
    assert indexed["spec"]["activeDeadlineSeconds"] == 25 * 3600 + 1
    pod = indexed["spec"]["template"]["spec"]
    assert {"name": "checkpoints", "mountPath": "/ckpt"} in pod["containers"][0]["volumeMounts"]
    assert {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "claim-1"}} in pod[
        "volumes"
    ]
    assert pod["containers"][0]["resources"]["requests"] == {"cpu": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_nodes": 0},
            r"num_nodes must be at least 1, but got num_nodes=0\. Ask for one or more",
        ),
        ({"gpus_per_node": 0}, r"gpus_per_node must be at least 1, but got gpus_per_node=0\. Ask"),
        (
            {"processes_per_node": 3},
            r"must divide the slots of every node, but got 3 and each node has slots=8\. Use 2",
        ),
        (
            {"name": "My_Job"},
            r"up to 40 lower-case letters.*got name='My_Job'\. Write for instance 'train-gpt'",
        ),
        (
            {"time_limit": "9" * 5000 + "-00:00:00"},
            r"but got time='9{40}'\.\.\. \(5009 characters\)\. Write",
        ),
        (
            {"time_limit": "90"},
            r"must be \[D-\]HH:MM:SS, but got time='90'\. Write for instance 24:00:00",
        ),
        (
            {"volume": "claim"},
            r"must be CLAIM:PATH, but got volume='claim'\. Write for instance checkpoints:/data",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_jobs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        ClusterJob(**{**vars(JOBS["plain"]), **changes})


@pytest.mark.parametrize("make", [kubernetes_manifest, jobset_manifest])
def test_kubernetes_needs_an_image(make: Callable[[ClusterJob], str]) -> None:
    with pytest.raises(
        LaunchError, match=r"must have a container image, but got image=None\. Give --image"
    ):
        make(JOBS["plain"])


def test_an_indexed_job_restarts_nothing() -> None:
    with pytest.raises(
        LaunchError, match=r"must not restart.*but got max_restarts=2\. Write a JobSet"
    ):
        kubernetes_manifest(_with_image(JOBS["plain"], max_restarts=2))


def test_a_slurm_file_restarts_nothing() -> None:
    with pytest.raises(
        LaunchError, match=r"no restarts.*but got max_restarts=2\. Leave it out; to continue"
    ):
        slurm_script(_with_image(JOBS["plain"], max_restarts=2))


def test_a_slurm_file_has_no_volume() -> None:
    with pytest.raises(
        LaunchError, match=r"no volume claim.*but got volume='a:/b'\. Leave it out, and keep"
    ):
        slurm_script(_with_image(JOBS["plain"], volume="a:/b"))


def test_writing_needs_the_counts(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("--write", "slurm", "--num_nodes", 2, "train.py") == 2
    assert (
        "--write must come with --num_nodes and --num_gpus, but got no --num_gpus. Give"
        in capfd.readouterr().err
    )
