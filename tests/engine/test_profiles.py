"""What a step is called in HLO and in a recorded profile."""

import contextlib
import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import pytest
from _covering import sweep
from _small import build, entries, entry, module

from jaxpipe import LayerSpec

SCOPES = {"forward", "backward", "loss", "send", "reduce", "update"}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(4)(nn.tanh(nn.Dense(8)(x)))


def model(*cuts: int, **kwargs: Any) -> Any:
    """Four blocks in the trunks of two stages, a layer before and one after them."""
    layers = [LayerSpec(nn.Dense, 4), *[LayerSpec(Block)] * 4, LayerSpec(nn.Dense, 1)]
    return module(*layers, partition_method=[0, *(cuts or [3]), 6], **kwargs)


NAMES = {"0_Dense", "1_Block", "2_Block", "3_Block", "4_Block", "5_Dense"}


def hlo(engine: Any) -> str:
    return (
        engine.pipeline.step.lower(engine.pipeline.states.struct, engine.pipeline.batches.struct)
        .compile()
        .as_text()
    )


def words(paths: set[str]) -> set[str]:
    return {word for path in paths for part in path.split("/") for word in part.split(",")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cuts", "pipeline", "more"),
    sweep(
        1,
        [
            ([3], {"schedule": "zero-bubble-h1"}, {"weight_gradient"}),
            ([3], {}, set()),
            ([2, 3, 4], {"schedule": "1f1b-v"}, {"receive"}),  # where values wait for their action
            ([3], {"scan_trunk": True}, set()),
        ],
        unpack=True,
    ),
)
def test_operations_are_named_by_layer_and_phase(
    cuts: list[int], pipeline: dict[str, Any], more: set[str]
) -> None:
    text = hlo(build(model(*cuts, data=2), {"pipeline": pipeline}, example_batch=entry(samples=4)))
    assert text.startswith("HloModule jit_jaxpipe_train_step,")
    paths = set(re.findall(r'op_name="([^"]*)"', text))
    found = words({path.replace("(", "/").replace(")", "/") for path in paths})
    assert found >= NAMES | SCOPES | more
    for phase in ("forward", "backward"):
        of_phase = {path for path in paths if f"/{phase}/" in path}
        assert words({p.replace("(", "/").replace(")", "/") for p in of_phase}) >= NAMES - {
            "5_Dense"
        }, phase
    assert any("/loss/" in path and "5_Dense" in path for path in paths)


@pytest.mark.slow
def test_names_change_neither_numbers_nor_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def stripped(text: str) -> list[str]:
        body = text[text.index("\n%") :]
        return sorted(
            re.sub(r"%[\w.-]+|, metadata=\{[^}]*\}", "", line) for line in body.splitlines()
        )

    def run() -> tuple[list[str], list[float]]:
        engine = build(model(), example_batch=entry())
        text = hlo(engine)
        return stripped(text), [float(engine.train_batch(entries(step))) for step in range(3)]

    named = run()
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    assert run() == named


# Jaxlib's, on Python 3.12.
@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:builtin type \w+ has no __module__:DeprecationWarning")
def test_a_recorded_profile_names_every_layer(tmp_path: Path) -> None:
    engine = build(model(), example_batch=entry())
    engine.train_batch(entries())
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(engine.train_batch(entries()))
    (file,) = tmp_path.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    events = [event for plane in data.planes for line in plane.lines for event in line.events]
    ran = {stats["hlo_op"] for event in events if "hlo_op" in (stats := dict(event.stats))}
    assert {event.name for event in events} >= {"jaxpipe_train_step"}
    assert {dict(e.stats).get("step_num") for e in events if e.name == "jaxpipe_train_step"} == {1}
    # An event has an operation's name, and the compiled program that of the layers and phases it
    # belongs to.
    name_of = dict(
        re.findall(r'^\s*(?:ROOT )?%([\w.-]+) = .*op_name="([^"]*)"', hlo(engine), re.MULTILINE)
    )
    paths = {name_of[op].replace("(", "/").replace(")", "/") for op in ran if op in name_of}
    assert words(paths) >= NAMES | {"forward", "backward"}
