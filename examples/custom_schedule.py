"""Write your own pipeline schedule, have it checked, and train with it.

    python examples/custom_schedule.py

A schedule defines what each stage does in each step. It knows nothing about devices or arrays. This
one runs all forwards of the batch first, as GPipe does, and then the backwards in last-in-first-out
order: the last stage starts its backwards with the microbatch that it has just finished.
"""

import argparse
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe
from jaxpipe import schedules
from jaxpipe.topology import PipeDataParallelTopology

NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS = 3, 4, 5


class LastInFirstOut(schedules.TimetableSchedule):
    """All forwards, then all backwards from the last microbatch to the first.

    A timetable names the chunk and the microbatch that a stage runs in each step. A stage with one
    chunk has chunk 0, and a microbatch that does not exist means that the stage is idle. Loads,
    exchanges, buffers and the optimiser step are derived from the timetable. A schedule that needs
    more control subclasses `schedules.PipeSchedule` and gives every instruction itself.
    """

    hop = 1
    """Steps between a microbatch's backward on one stage and on the stage before."""

    def num_steps(self) -> int:
        """Return the number of steps: `M + S - 1` for forwards and as many for backwards."""
        return 2 * (self.micro_batches + self.stages - 1)

    def forward_at(self, step: int) -> tuple[int, int]:
        """Return the forward of a step: stage s runs microbatch m at step `m + s`."""
        return 0, step - self.stage_id

    def backward_at(self, step: int) -> tuple[int, int]:
        """Return the backward of a step.

        The last stage starts at step `M + S - 1` with the last microbatch.
        """
        start = self.num_steps() // 2 + self.hop * (self.stages - 1 - self.stage_id)
        return 0, self.micro_batches - 1 - (step - start)


class Impatient(LastInFirstOut):
    """A schedule with a mistake, which the checker finds.

    Every stage runs its backwards at the same time as the last stage, before the gradients have
    arrived.
    """

    hop = 0


def train(schedule: str | type[schedules.PipeSchedule], num_steps: int) -> list[float]:
    """Train a small model with a schedule and return the losses of its steps."""
    layers = [jaxpipe.LayerSpec(nn.Dense, 16), jnp.tanh, jaxpipe.LayerSpec(nn.Dense, 16), jnp.tanh]
    model = jaxpipe.PipelineModule(
        [*layers, jaxpipe.LayerSpec(nn.Dense, 1)],
        topology=PipeDataParallelTopology(NUM_STAGES, 1),
        loss_fn=lambda outputs, labels: jnp.mean((outputs - labels) ** 2),
    )
    engine, *_ = jaxpipe.initialize(
        model=model,
        optimizer=optax.adam(1e-2),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": NUM_MICROBATCHES,
            "pipeline": {"schedule": schedule},
        },
    )
    inputs = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    data_iter = itertools.repeat((inputs, np.sin(inputs.sum(1, keepdims=True))))
    return [float(engine.train_batch(data_iter)) for _ in range(num_steps)]


def main() -> None:
    """Print the schedule's grid, the checker's verdicts and the losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=NUM_STEPS, help=f"optimiser steps (default: {NUM_STEPS})"
    )
    num_steps = parser.parse_args().steps
    jax.config.update("jax_num_cpu_devices", 8)
    print("LastInFirstOut:")
    print(schedules.format_grid(LastInFirstOut, NUM_MICROBATCHES, NUM_STAGES))
    schedules.check_schedule(LastInFirstOut, NUM_MICROBATCHES, NUM_STAGES)
    print("the checker finds it sound\n\nImpatient:")
    try:
        schedules.check_schedule(Impatient, NUM_MICROBATCHES, NUM_STAGES)
    except jaxpipe.errors.ScheduleError as error:
        print(f"the checker refuses it: {error}\n")
    own, default = train(LastInFirstOut, num_steps), train("1f1b", num_steps)
    for step, pair in enumerate(zip(own, default, strict=True)):
        print(f"step {step}: loss {pair[0]:.6f} with LastInFirstOut, {pair[1]:.6f} with 1f1b")
    print(f"largest difference: {max(abs(a - b) for a, b in zip(own, default, strict=True)):.1e}")


if __name__ == "__main__":
    main()
