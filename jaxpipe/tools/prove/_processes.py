"""The same steps in two processes."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._bound import differences_of
from ._claims import NotCovered, judged
from ._job import Job, Precision, as_double
from ._numbers import Wanted, run_steps
from ._proof import Finding

_TIME_LIMIT_S = 600.0


def process_findings(
    job: Job, wanted_in: Callable[[Precision], Wanted], command: Sequence[str] | None
) -> Iterator[Any]:
    """Run the same steps in two processes, or three if devices are not shared out to two.

    Each makes the job from the arguments `command` of `_member.main`. None: they are not known.
    """
    if command is None:
        yield NotCovered("a function cannot be sent to other processes. Run jaxpipe prove.")
        return
    # One of them is the number of replicas.
    processes = 3 if job.mesh.size % 2 else 2
    with tempfile.TemporaryDirectory(prefix="jaxpipe-prove-") as folder:
        to = Path(folder) / "steps.npz"
        launch = ("-m", "jaxpipe", "launch", "--nproc", str(processes), "--cpu-devices")
        if failed := failure_of(
            [
                *(sys.executable, *launch, str(job.mesh.size // processes)),
                *("--module", "jaxpipe.tools.prove._member", "--to", str(to), *command),
            ]
        ):
            yield Finding(f"{processes} processes", failed)
            return
        with np.load(to) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    values, limits = wanted_in(job.finest)
    # What `steps_of` gives: processes do not run the other results.
    kinds = ("loss", "scale", "update", "average", "collection")
    wanted = {name: x for name, x in values.items() if name.partition("/")[0] in kinds}
    yield from judged(differences_of(wanted, found, limits))


def failure_of(command: Sequence[str]) -> str:
    """Run a launcher; returns why it failed, or nothing."""
    with subprocess.Popen(  # noqa: S603  # this program
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            output, errors = launcher.communicate(timeout=_TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"did not end in {_TIME_LIMIT_S:.0f} s."
        finally:
            launcher.terminate()  # unless it has ended; it ends its processes
    return (errors or output)[-2000:].strip() if launcher.returncode else ""


def steps_of(job: Job) -> dict[str, Any]:
    """Run a process's part of the steps, and return their results by name."""
    with job.finest.enabled():
        found = run_steps(job, job.finest)
    # A file of arrays has no bfloat16.
    return {name: as_double(x) for name, x in found.items()}
