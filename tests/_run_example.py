"""Run an example or a benchmark as its user would."""

import re

from _warm import ROOT, run_program


def run_example(name: str, *arguments: str, status: int = 0) -> str:
    """What the example prints.

    Its error output where it is expected to end with another status.
    """
    done = run_program([str(ROOT / "examples" / name), *arguments], status=status)
    return done.stdout or done.stderr


def run_benchmark(name: str, *arguments: str, status: int = 0) -> str:
    """What a benchmark prints, its error output last."""
    done = run_program(["-m", f"benchmarks.{name}", *arguments], status=status)
    return done.stdout + done.stderr


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
