"""When a vocabulary is split over the stages by itself, and what is said of it."""

import dataclasses
import logging
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _models import DIM, ROWS, Block, specs
from _tolerances import assert_close, assert_loss

import jaxpipe
from jaxpipe import LayerSpec, PipelineModule, TiedLayerSpec, describe_pipeline
from jaxpipe.core.planner._choose import candidates
from jaxpipe.core.planner._memory import DeviceMemory
from jaxpipe.forecast import HARDWARE
from jaxpipe.layers import VocabEmbed, VocabHead
from jaxpipe.losses import cross_entropy

MICROBATCHES = 8
TABLE = 2048 * ROWS
"""So many rows that a split of them pays."""
SIZES = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICROBATCHES}
Loss = Callable[..., Any] | None


def by_hand(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def model(
    rows: int = TABLE, loss_fn: Loss = cross_entropy, num_stages: int = 4, **kwargs: Any
) -> PipelineModule:
    layers = [nn.Embed(rows, DIM), *specs(Block), *specs(Block), LayerSpec(nn.Dense, rows)]
    return PipelineModule(layers, num_stages, loss_fn=loss_fn, **kwargs)


def tokens(rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(0).integers(0, rows, (2, 16)).astype(np.int32)


def built(module: PipelineModule, optimizer: Any = None, **section: Any) -> jaxpipe.Pipeline:
    mesh = jaxpipe.mesh_for(module, jax.devices()[: module.num_stages])
    config = {**SIZES, "pipeline": section}
    return jaxpipe.make_pipeline(
        module, optimizer or optax.adamw(1e-2), config, mesh, (tokens(), tokens())
    )


@pytest.mark.parametrize(
    "section",
    [
        {},
        pytest.param({"schedule": "auto"}, marks=pytest.mark.slow),
        pytest.param({"schedule": "interleaved", "num_chunks": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_large_vocabulary_is_split_and_plan_agrees(section: dict[str, Any]) -> None:
    pipeline = built(model(), **section)
    last = len(pipeline.module.layers) - 1
    assert pipeline.stage.ends.layers == (0, last)
    assert pipeline.plan.config.pipeline.split_vocabulary is True
    text = describe_pipeline(pipeline)
    assert (
        "the first and last layers and the loss are split over the stages "
        "(pipeline.split_vocabulary): a step" in text
    )
    config = {**SIZES, "pipeline": section}
    found = jaxpipe.plan(
        *(model(), config, (tokens(), tokens()), "h100:4"),
        optimizer=optax.adamw(1e-2),
        alternatives=False,
    )
    assert any("the loss are split over the stages" in line for line in found.assumptions)


@pytest.mark.slow
def test_the_numbers_are_those_of_whole_layers() -> None:
    split, whole = built(model()), built(model(), split_vocabulary=False)
    batch = tuple(np.stack([tokens(TABLE)] * MICROBATCHES) for _ in "xy")
    states = []
    for pipeline in (split, whole):
        state, metrics = pipeline.step(pipeline.init(), (*batch, {}))
        states.append((metrics["loss"], pipeline.params_tree(state.params)))
    assert_loss(states[0][0], states[1][0])
    assert_close(states[0][1], states[1][1])


@pytest.mark.parametrize(
    ("module", "note"),
    [
        (
            model(loss_fn=by_hand),
            "not split over the stages: loss_fn must leave logits that are split",
        ),
        (
            model(TABLE + 1),
            "not split over the stages: .* vocabulary that num_stages divides, but got 32769",
        ),
    ],
    ids=["loss", "size"],
)
def test_what_cannot_be_split_stays_whole(module: PipelineModule, note: str) -> None:
    pipeline = built(module)
    assert not pipeline.stage.ends.layers
    assert pipeline.plan.config.pipeline.split_vocabulary is False
    said = [line for line in pipeline.plan.notes if "not split over the stages" in line]
    assert len(said) == 1
    assert re.search(note, said[0])


@pytest.mark.parametrize(
    ("num_stages", "section"),
    [(1, {"overlap_vocabulary": True}), (2, {"split_vocabulary": False})],
)
def test_one_stage_and_no_wish_leave_it_whole(num_stages: int, section: dict[str, Any]) -> None:
    pipeline = built(model(ROWS, num_stages=num_stages), **section)
    assert not pipeline.stage.ends.layers
    assert pipeline.plan.config.pipeline.split_vocabulary is False


def table(**kwargs: Any) -> TiedLayerSpec:
    return TiedLayerSpec("table", nn.Embed, TABLE, DIM, **kwargs)


def of_entry(outputs: Any, labels: jax.Array) -> Any:
    return cross_entropy(outputs[0], labels)


def tripled(*args: Any, **kwargs: Any) -> jax.Array:
    return 3 * jax.lax.dot_general(*args, **kwargs)


def masked(embed: nn.Embed, x: jax.Array) -> jax.Array:
    return embed.attend(x).at[..., 500:].set(-1e9)


AGAIN = table(forward_fn=lambda embed, x: x + jax.nn.softmax(embed.attend(x)) @ embed.embedding)
HEAD = table(forward_fn=nn.Embed.attend)


@pytest.mark.parametrize(
    ("ends", "loss_fn", "note"),
    [
        ([table(forward_fn=masked)], cross_entropy, "a forward_fn that returns attend.x.*masked"),
        ([table(forward_fn=lambda m, x: (m.attend(x), x))], of_entry, "that returns attend"),
        ([AGAIN, HEAD], cross_entropy, "the only users of their parameters"),
        ([nn.Dense(TABLE, dot_general=tripled)], cross_entropy, "default dot_general"),
    ],
    ids=["mask", "tuple", "use", "dot_general"],
)
def test_what_may_see_a_slice_stays_whole(ends: list[Any], loss_fn: Loss, note: str) -> None:
    layers = [table(), *specs(Block), *specs(Block), *ends]
    pipeline = built(PipelineModule(layers, 4, loss_fn=loss_fn))
    assert not pipeline.stage.ends.layers
    # Of a loss that takes little of a tick nothing is said.
    said = "".join(pipeline.plan.notes)
    assert re.search(f"not split over the stages: .*{note}", said) or "and the loss" not in said


@pytest.mark.slow
def test_a_first_layer_that_reads_its_table_stays_whole() -> None:
    def rows(embed: nn.Embed, tokens: jax.Array) -> jax.Array:
        return embed.variables["params"]["embedding"][tokens]

    layers = [LayerSpec(nn.Embed, TABLE, DIM), *specs(Block), *specs(Block)]
    layers = [*layers, LayerSpec(nn.Dense, TABLE)]
    assert built(PipelineModule(layers, 4, loss_fn=cross_entropy)).stage.ends.layers

    def looked_up(embed: nn.Embed, tokens: jax.Array) -> jax.Array:
        return rows(embed, tokens) if embed.has_variable("params", "embedding") else embed(tokens)

    layers[0] = LayerSpec(nn.Embed, TABLE, DIM, forward_fn=looked_up)
    assert not built(PipelineModule(layers, 4, loss_fn=cross_entropy)).stage.ends.layers
    layers[0] = LayerSpec(nn.Embed, TABLE, DIM, forward_fn=lambda m, x: 2 * m(x))
    assert built(PipelineModule(layers, 4, loss_fn=cross_entropy)).stage.ends.layers


def test_losses_a_tick_later_are_had_by_a_split() -> None:
    assert built(model(), overlap_vocabulary=True).plan.program.delays_loss


def test_an_optimiser_that_looks_at_whole_tables_keeps_them_whole() -> None:
    pipeline = built(model(), optax.lamb(1e-2))
    assert not pipeline.stage.ends.layers
    assert "one that needs all of layers/0_Embed/embedding" in "".join(pipeline.plan.notes)


def test_what_takes_longer_split_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an automatic axis the sums over the stages have nothing to travel under."""
    slow = dataclasses.replace(HARDWARE["h100"], wire_bytes_per_s=1e6)
    monkeypatch.setattr("jaxpipe.core.pipeline._traced.reference_hardware", lambda _: slow)
    x = jax.ShapeDtypeStruct((4, 16), jnp.int32)
    config = {**SIZES, "zero_optimization": {"stage": 3}}
    module = model(8)
    pipeline = jaxpipe.make_pipeline(
        module, optax.adamw(1e-2), config, jaxpipe.mesh_for(module), (x, x)
    )
    assert not pipeline.stage.ends.layers
    assert "the loss are not split over the stages (pipeline.split_vocabulary): a step" in "".join(
        pipeline.plan.notes
    )


@pytest.mark.parametrize(
    ("whole_gb", "words"),
    [
        (90, "are split .*50.0 GB, which fits, and with all of them whole 90.0 GB, which does not"),
        (10, "are not split .*50.0 GB, which does not fit, and with all of them whole 10.0 GB"),
    ],
)
def test_memory_is_the_reason_where_it_decides(
    monkeypatch: pytest.MonkeyPatch, whole_gb: float, words: str
) -> None:
    sizes = iter([whole_gb, 50])

    def forecasts(*args: Any) -> list[Any]:
        (found, *_) = candidates(*args)
        size = next(sizes)
        memory = DeviceMemory(**{**dict.fromkeys(vars(found.memory), 0.0), "weights": size * 1e9})
        # Whichever needs less fits.
        return [dataclasses.replace(found, memory=memory, fits=size == min(50, whole_gb))]

    monkeypatch.setattr("jaxpipe.core.planner._split.candidates", forecasts)
    (note,) = (each for each in built(model()).plan.notes if "the loss are" in each)
    assert re.search(words, note)


def test_layers_that_are_split_already_and_a_single_stage_are_left_alone() -> None:
    layers = [
        LayerSpec(VocabEmbed, TABLE, DIM),
        *specs(Block),
        *specs(Block),
        LayerSpec(VocabHead, TABLE),
    ]
    pipeline = built(PipelineModule(layers, 4, loss_fn=cross_entropy))
    assert pipeline.stage.ends.layers
    assert not any("split over the stages" in note for note in pipeline.plan.notes)
    assert not built(model(num_stages=1)).stage.ends.layers


def test_a_model_without_a_vocabulary_hears_nothing(caplog: pytest.LogCaptureFixture) -> None:
    module = PipelineModule(
        [nn.Dense(8) for _ in range(8)], 4, loss_fn=lambda y, t: jnp.mean((y - t) ** 2)
    )
    mesh, x = jaxpipe.mesh_for(module, jax.devices()[:4]), np.ones((2, 8), np.float32)
    with caplog.at_level(logging.INFO, "jaxpipe"):
        pipeline = jaxpipe.make_pipeline(module, optax.sgd(0.1), SIZES, mesh, (x, x))
    assert "vocabulary" not in caplog.text + describe_pipeline(pipeline)


@pytest.mark.soak
def test_the_engine_keeps_its_first_choice() -> None:
    def engine(module: PipelineModule) -> Any:
        mesh = jaxpipe.mesh_for(module, jax.devices()[:4])
        return jaxpipe.initialize(
            model=module, config=SIZES, optimizer=optax.adamw(1e-2), mesh=mesh
        )[0]

    def batches() -> Any:
        return iter([(tokens(), tokens())] * MICROBATCHES)

    # A prediction knows no labels, so that nothing is split for it, nor after it.
    predicts_first, trains_first = engine(model()), engine(model())
    logits = predicts_first.predict(tokens())
    losses = [float(each.train_batch(batches())) for each in (predicts_first, trains_first)]
    assert_loss(losses[0], losses[1])
    assert trains_first.predict(tokens()).shape == logits.shape
    assert_loss(
        predicts_first.eval_batch(batches()), trains_first.eval_batch(batches()), tolerance=2e-6
    )
    assert [bool(each.pipeline.stage.ends.layers) for each in (predicts_first, trains_first)] == [
        False,
        True,
    ]
