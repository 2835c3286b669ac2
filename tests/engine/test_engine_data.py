"""What a user's iterator may do.

Yield anything, change its mind, end or fail in the middle of a batch.
"""

import logging
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from _refusals import assert_refused
from _small import build, build_alone, entries, entry, mean_square, module

from jaxpipe import LayerSpec, PipelineEngine
from jaxpipe.errors import DataError, LayerError


@pytest.fixture(scope="module")
def engine() -> PipelineEngine:
    return build_alone(example_batch=entry())


def before_and_after(engine: PipelineEngine) -> tuple[Any, ...]:
    return engine.global_steps, engine.global_samples


@pytest.mark.parametrize("steps", [0, 2])
def test_data_that_end_within_a_batch(
    engine: PipelineEngine, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    start = engine.global_steps
    data = entries(count=2 * steps + 1)
    for _ in range(steps):
        engine.train_batch(data)
    lost = (
        rf"the data ended after 1 of 2 microbatches of step {start + steps + 1}, which are "
        r"lost.*Give a multiple of 2"
    )
    with caplog.at_level(logging.WARNING, "jaxpipe"), pytest.raises(StopIteration, match=lost):
        engine.train_batch(data)
    assert [record.getMessage()[:39] for record in caplog.records] == [
        "the data ended after 1 of 2 microbatche"
    ]
    assert engine.global_steps == start + steps
    caplog.clear()
    with pytest.raises(
        StopIteration, match=r"^the data ended before step \d: a list_iterator has no more"
    ):
        engine.train_batch(data)
    words = "must have 3 more entries for an evaluation, but got 2 from a list_iterat"
    assert_refused(DataError, words, engine.eval_batch, entries(count=2), num_micro_batches=3)
    assert not caplog.records


def failing(count: int, error: Exception) -> Iterator[Any]:
    yield from entries(count=count)
    raise error


def test_data_that_fail_within_a_batch(engine: PipelineEngine) -> None:
    start = before_and_after(engine)
    with pytest.raises(OSError, match="^no such file\n") as found:
        engine.train_batch(failing(1, OSError("no such file")))
    [note] = found.value.__notes__
    assert note == (
        f"This came from data_iter after 1 of 2 microbatches of step {start[0] + 1}, which are "
        "lost: nothing was computed from them."
    )
    with pytest.raises(OSError, match="^at once$") as found:
        engine.train_batch(failing(0, OSError("at once")))
    assert not hasattr(found.value, "__notes__")
    assert before_and_after(engine) == start
    engine.train_batch(entries())


def test_a_batch_fn_that_fails_within_a_batch(engine: PipelineEngine) -> None:
    def convert(found: Any) -> Any:
        return found[0], found[1]

    engine.set_batch_fn(convert)
    with pytest.raises(KeyError) as found:
        engine.train_batch(iter([entry(), {}]))
    assert "after 1 of 2 microbatches" in found.value.__notes__[0]
    engine.set_batch_fn(None)


X, Y = entry()


def test_data_that_change_at_a_later_step(engine: PipelineEngine) -> None:
    same = "must have the same structure ... got"
    for words, changed in (
        (
            "^inputs must have the dtype ... had float32[2, 4], but got int32[2, 4]. Only sh",
            (X.astype(np.int32), Y),
        ),
        (f"^inputs {same} inputs['a'] in place of inputs in this batch.", ({"a": X}, Y)),
        (f"^labels {same} labels[0] in place of labels in this batch. G", (X, [Y, Y])),
        (f"^side {same} an additional side['mask'] in this batch", (X, Y, {"mask": X})),
        (
            "2 * 1 = 2 samples as its first dim, but got inputs = float32[1, 4]. Yield 2 samples",
            (X[:1], Y[:1]),
        ),
        (
            "inputs=float32[2, 5] with ... kernel=float32[5, 3] ... inputs=float32[2, 4",
            (np.ones((2, 5), np.float32), Y),
        ),
        (
            "got inputs[0][0] = float32[]. ... convert it to an array with numpy",
            (X.tolist(), Y),
        ),
        ("labels must have the same structure ... no labels in this batch", (X, None)),
        (
            "at least one array, but got inputs=None. Yield (inputs, labels)",
            (None, Y),
        ),
        (
            "must be a dictionary ... got side = a ndarray in entry 0. Yield",
            (X, Y, X),
        ),
        (
            "labels in entry 0 = a masked array of float32[2, 1]. Fill",
            (jnp.asarray(X), np.ma.masked_array(Y, Y > 0)),
        ),
    ):
        data = chain(entries(count=6), repeat(changed, 2), entries(count=2))
        for _ in range(3):
            engine.train_batch(data)
        start = before_and_after(engine)
        assert_refused(DataError, words, engine.train_batch, data)
        assert before_and_after(engine) == start


@pytest.mark.parametrize(
    ("loss_fn", "labels", "match"),
    [
        (
            mean_square,
            np.ones((2, 2), np.float32),
            r"labels float32\[2, 2\]: .*incompatible shapes",
        ),
        (mean_square, None, r"labels None: unsupported operand"),
        (lambda y, t: mean_square(y, t["y"]), {"x": Y}, r"labels \{x: float32\[2, 1\]\}: 'y'"),
    ],
    ids=["shape", "none", "key"],
)
def test_labels_that_loss_fn_cannot_take(loss_fn: Any, labels: Any, match: str) -> None:
    engine = build(module(LayerSpec(nn.Dense, 3), LayerSpec(nn.Dense, 3), loss_fn=loss_fn))
    match = rf"while tracing loss_fn with outputs float32\[2, 3\], {match}.*\. Let the data yield"
    with pytest.raises(LayerError, match=match) as found:
        engine.train_batch(repeat((X, labels), 2))
    assert isinstance(found.value.__cause__, TypeError | KeyError)


def test_side_inputs_given_as_none(engine: PipelineEngine) -> None:
    assert np.isfinite(float(engine.train_batch(iter([(X, Y, None), (X, Y, {})]))))


def test_an_array_that_is_filled_anew_for_each_microbatch() -> None:
    def data(*, is_new: bool) -> Iterator[Any]:
        held = X.copy(), Y.copy()
        for seed in range(4):
            held = (X.copy(), Y.copy()) if is_new else held
            for array, values in zip(held, entry(seed), strict=True):
                array[:] = values
            yield held

    engine = build_alone()
    assert not engine._trainer.has_state
    wanted, given = data(is_new=True), data(is_new=False)
    losses = [
        [float(each.train_batch(found)) for _ in range(2)]
        for each, found in ((engine, wanted), (build_alone(), given))
    ]
    assert losses[0] == losses[1]
