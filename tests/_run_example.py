"""Run an example or a benchmark as its user would, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jaxpipe

_ROOT = Path(__file__).parents[1]


def run_example(name: str, *arguments: str, status: int = 0) -> str:
    """What the example prints.

    Its error output where it is expected to end with another status.
    """
    done = _run([str(_ROOT / "examples" / name), *arguments], status)
    return done.stdout or done.stderr


def run_benchmark(name: str, *arguments: str, status: int = 0) -> str:
    """What a benchmark prints, its error output last."""
    done = _run(["-m", f"benchmarks.{name}", *arguments], status)
    return done.stdout + done.stderr


def _run(arguments: list[str], status: int) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(jaxpipe.__file__).parents[1]), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def check_sharded_run(printed: str, largest_share: float) -> None:
    """Losses fell, and one device agrees.

    The first device holds more than a fourth of the parameters but not much.
    """
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)", printed, re.MULTILINE)]
    assert losses[-1] < 0.7 * losses[0]
    found = re.findall(r"parameters: (\S+) of the model, (\S+) on", printed)[0]
    whole, first = (int(number.replace(",", "")) for number in found)
    assert whole / 4 < first < largest_share * whole
    pipelined, alone = map(
        float, re.findall(r"(?:first|next) batch: (\S+), on one device (\S+)", printed)[0]
    )
    assert abs(pipelined - alone) < 1e-5
