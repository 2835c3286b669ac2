"""Write a pipeline schedule of one's own, have it proved sound, and train with it.

    python examples/custom_schedule.py

A schedule says what each stage does in each step, and nothing of devices or arrays. This one runs all forwards of the
batch first, as GPipe does, and then the backwards last in, first out: the last stage turns round on the microbatch it
has just finished, whose activations are the youngest.
"""

import argparse
import itertools
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe
from jaxpipe import schedules
from jaxpipe.topology import PipeDataParallelTopology

NUM_STAGES, NUM_MICROBATCHES, NUM_STEPS = 3, 4, 5


class LastInFirstOut(schedules.PipeSchedule):
    """All forwards, then all backwards from the last microbatch to the first."""

    hop = 1
    """Steps from a backward on one stage to the same on the stage before."""

    def steps(self) -> Iterator[list[schedules.PipeInstruction]]:
        """Yield the instructions of each step: exchanges of what earlier steps computed, then computing."""
        turn = self.micro_batches + self.stages - 1  # the step of the last stage's first backward
        for step in range(2 * turn):
            forward = step - self.stage_id
            backward = self.micro_batches - 1 - (step - turn - self.hop * (self.stages - 1 - self.stage_id))
            commands = self.exchanges(forward, backward)
            if self.exists(forward):
                if self.is_first_stage or self.is_last_stage:  # inputs here, labels there
                    commands.append(schedules.LoadMicroBatch(forward))
                commands.append(schedules.ForwardPass(forward))
            if self.exists(backward):
                commands.append(schedules.BackwardPass(backward))
            if step == 2 * turn - 1:
                commands += [schedules.ReduceTiedGrads(), schedules.ReduceGrads(), schedules.OptimizerStep()]
            yield commands

    def exchanges(self, forward: int, backward: int) -> list[schedules.PipeInstruction]:
        """What moves: inputs of this step's computing come in, results of the step before go out."""
        moves = []
        if not self.is_first_stage:
            moves += [schedules.SendGrad(backward + 1)] if self.exists(backward + 1) else []
            moves += [schedules.RecvActivation(forward)] if self.exists(forward) else []
        if not self.is_last_stage:
            moves += [schedules.RecvGrad(backward)] if self.exists(backward) else []
            moves += [schedules.SendActivation(forward - 1)] if self.exists(forward - 1) else []
        return moves

    def exists(self, microbatch: int) -> bool:
        """Whether there is such a microbatch."""
        return 0 <= microbatch < self.micro_batches

    def num_pipe_buffers(self) -> int:
        """Give the number of buffers: microbatch m lives in buffer m, as all are in flight at the turn."""
        return self.micro_batches


class Impatient(LastInFirstOut):
    """A mistake: every stage runs its backwards when the last stage does, without waiting for the gradients."""

    hop = 0


def train(schedule: str | type[schedules.PipeSchedule], num_steps: int) -> list[float]:
    """Losses of some steps of a small model under a schedule."""
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
    """Print the grid, the checker's verdicts and the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help=f"optimiser steps (default: {NUM_STEPS})")
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
