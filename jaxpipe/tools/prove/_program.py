"""The program that is compiled for the hardware of the job, without that hardware."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import optax

from jaxpipe._util.typing import PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.core.planner import Hardware
from jaxpipe.layers import PipelineModule
from jaxpipe.tools.plan import plan

from ._optimizing import optimizing
from ._proof import Finding


def program_findings(
    model: PipelineModule,
    config: TrainConfig,
    example_batch: Sequence[PyTree],
    optimizer: optax.GradientTransformation | None,
    axes: Mapping[str, int] | None,
    hardware: tuple[Hardware, int],
) -> Iterator[Any]:
    """Compile the step of the job at its own sizes, and read what its loops hold."""
    schedule = config.pipeline.schedule
    with optimizing(fully=True):  # what would run
        found = plan(
            model,
            config,
            example_batch,
            hardware,
            optimizer=optimizer,
            axes=axes,
            schedules=[schedule] if isinstance(schedule, str) and schedule != "auto" else None,
            partition=[model.partition_method],
            alternatives=False,
            compiles=True,
        )
    compiled = found.compiled
    assert compiled is not None  # as asked
    reading = compiled.reading
    limit = found.limit_bytes
    for text in reading.divergent:
        yield Finding(
            "program",
            f"{text} joins several stages, which may not all get there. A layer must not exchange "
            "values over the axis stage.",
        )
    if compiled.total_bytes > limit:
        yield Finding(
            "program",
            f"it takes {compiled.total_bytes / 1e9:.2f} GB of a device, and {limit / 1e9:.2f} GB "
            f"can be used. {found.advice or 'Run jaxpipe plan for what takes less.'}",
        )
    yield {
        "candidate": compiled.label,
        "GB of a device": f"{compiled.total_bytes / 1e9:.2f}",
        "of the plan's": f"{compiled.total_bytes / compiled.counted_bytes:.2f}",
        "collectives of a steady tick": reading.num_collectives,
        "not under products": ", ".join(reading.alone) or "none",
        "on their way at once": ", ".join(reading.overlapping) or "none",
    }
    if reading.host_waits is not None:
        yield {"host waits of a steady tick": reading.host_waits}
