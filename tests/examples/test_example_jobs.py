"""The docstrings of `examples/jobs` say what `jaxpipe plan` finds for these jobs."""

import runpy
import shlex
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxpipe

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "jobs").glob("*.py"))


def options(command: str) -> dict[str, str]:
    """The options of `jaxpipe plan FILE:job --name value`."""
    _, _, _, *words = shlex.split(command)
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_job_says_what_plan_finds(path: Path) -> None:
    found: dict[str, Any] = runpy.run_path(str(path))
    said = found["__doc__"]
    name = path.relative_to(ROOT).as_posix()
    (command,) = [line for line in said.splitlines() if f"jaxpipe plan {name}:job " in line]
    chosen = options(command)
    model, config, (inputs, labels) = found["job"]()
    with jax.numpy_rank_promotion("allow"):  # the model's norm
        plan = jaxpipe.plan(
            model,
            config,
            (inputs, labels),
            chosen["--hardware"],
            num_chunks=[int(count) for count in chosen["--num-chunks"].split(",")],
            alternatives=False,
        )
    best = plan.best
    assert best is not None, plan.advice
    replicas = plan.axes["data"] * plan.axes.get("fsdp", 1)
    texts = plan.num_microbatches * plan.microbatch_size * replicas
    # Two digits, so that a small change of the forecast does not change the docstring.
    for sentence in (
        f"{texts:,} texts of {inputs.shape[1]:,} tokens a step.",
        f"The mesh is {' x '.join(f'{axis} {size}' for axis, size in plan.axes.items())}",
        f"`plan` finds: {best.schedule} with {best.num_chunks} chunks, {best.step_s:.2g} s a step,"
        f" bubble {100 * best.bubble:.2g} %, {best.memory.total / 1e9:.0f} GB",
    ):
        assert sentence in " ".join(said.split())
    # The job is set to what the plan finds best.
    section = config["pipeline"]
    assert (section["schedule"], section["num_chunks"]) == (best.schedule, best.num_chunks)
    assert model.activation_checkpoint_interval == best.recompute


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_job_names_its_proof(path: Path) -> None:
    found = runpy.run_path(str(path))
    command = f"jaxpipe prove {path.relative_to(ROOT).as_posix()}:"
    (line,) = [line for line in found["__doc__"].splitlines() if command in line]
    assert callable(found[line.partition(command)[2].split()[0]])
