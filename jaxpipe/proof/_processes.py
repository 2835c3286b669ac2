"""The same steps in one process and in two."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpipe.jaxpr import arithmetic_of
from jaxpipe.layers import flatten_dict

from ._bound import distance, norm
from ._claims import NotCovered
from ._job import OWN, Job
from ._proof import Finding

_PROCESSES, _STEPS = 2, 2
_DEVIATIONS = 8.0
_TIME_LIMIT_S = 600.0


def process_findings(job: Job, command: Sequence[str] | None) -> Iterator[Any]:
    """Run the same steps in two processes, each with half of the devices.

    Args:
        job: The job.
        command: Arguments of `main` from which a process makes the job. None: it is not known.
    """
    if command is None:
        yield NotCovered("a function cannot be sent to other processes. Run jaxpipe prove.")
        return
    if job.num_devices % _PROCESSES:
        yield NotCovered(f"{job.num_devices} devices are not shared out to {_PROCESSES} processes")
        return
    wanted = steps_of(job)
    unit = arithmetic_of(list(job.pipeline(OWN).trace.programs))
    share = _DEVIATIONS * unit.unit * np.sqrt(unit.operations * len(job.module.layers))
    with tempfile.TemporaryDirectory(prefix="jaxpipe-prove-") as folder:
        to = Path(folder) / "steps.npz"
        launch = ("-m", "jaxpipe", "launch", "--nproc", str(_PROCESSES), "--cpu-devices")
        ended = subprocess.run(  # noqa: S603  # this program
            [
                *(sys.executable, *launch, str(job.num_devices // _PROCESSES)),
                *("--module", "jaxpipe.proof._member", "--to", str(to), *command),
            ],
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
            check=False,
        )
        if ended.returncode:
            yield Finding(f"{_PROCESSES} processes", (ended.stderr or ended.stdout)[-2000:].strip())
            return
        with np.load(to) as found:
            same = 0
            for name, value in wanted.items():
                same += np.array_equal(found[name], value, equal_nan=True)
                if not distance(found[name], value) <= share * norm(value):
                    yield Finding(name, f"differs in {_PROCESSES} processes.")
    yield {"results": len(wanted), "equal in all bits": same}


def steps_of(job: Job) -> dict[str, Any]:
    """Run steps, and return losses and parameters by name."""
    pipeline = job.pipeline(OWN)
    state, found = pipeline.init(jax.random.key(job.module.base_seed)), {}
    for step in range(_STEPS):
        state, metrics = pipeline.step(state, pipeline.place_batch(job.batch_in(OWN, step)))
        found[f"loss of step {step}"] = np.asarray(jax.device_get(metrics["loss"]))
    params = flatten_dict(pipeline.params_tree(state.params))
    return found | {"/".join(path): np.asarray(x) for path, x in params.items()}
