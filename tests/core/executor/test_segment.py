"""Segments by themselves: their layers, keys, gradients and collections."""

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from _covering import sweep
from _numbers import PRIMES, Gain, Noise, Numbers, Product, Reporter, Scale
from _tolerances import assert_close

from jaxpipe import TiedLayerSpec
from jaxpipe.core.executor._segment import Segment
from jaxpipe.core.executor._segment_program import SegmentProgram

KEY, X, GRADIENT = jax.random.key(3), 29.0, 31.0


class Pair(nn.Module):
    """Two numbers, of which either can be frozen."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        first = self.param("first", nn.initializers.ones, ())
        return x * first * self.param("second", nn.initializers.ones, ())


def one(value: float) -> jax.Array:
    return jnp.asarray([value])


def trunk(numbers: Numbers, **kwargs: Any) -> SegmentProgram:
    """The trunk of the first virtual stage, which runs those of the others too."""
    return SegmentProgram(numbers.blueprint, 0, [cut.trunk for cut in numbers.stage.cuts], **kwargs)


def leaves(segment: Segment, numbers: Numbers, stage: int = 0) -> dict[str, jax.Array]:
    """A stage's numbers by the names of the segment."""
    layout, storage = numbers.stage.params.layout, numbers.storage(stage)
    return {name: layout.get(stage, name, storage) for name in segment.names}


def context(numbers: Numbers, program: SegmentProgram, v: int) -> tuple[Any, ...]:
    return program.offset(numbers.at(v)), KEY, {}, [{} for _ in program.segment.layers]


@functools.cache
def noisy(interval: int = 0) -> Numbers:
    """Four drawing layers on each of two stages, which begin at layers 1 and 5."""
    return Numbers([Gain, *[Noise] * 8], [0, 5, 9], 2, interval=interval)


@functools.cache
def in_a_row(layers: range) -> jax.Array:
    """What the layers compute at their place in the model."""
    views = [{"noise": jnp.float32(PRIMES[i])} for i in layers]
    run = noisy().pipeline.module.run_layers(layers, views, train=True)
    return jax.jit(lambda: run(one(X), KEY, {}, [{} for _ in layers])[0])()


@pytest.mark.parametrize(
    ("scan", "interval", "groups"),
    # Groups of one, two and four layers. Three do not divide four: then each layer is a group.
    sweep(
        2,
        [(True, 2, 2), (False, 0, None), (True, 0, 4), (True, 4, 1), (True, 3, 4)],
        unpack=True,
    ),
)
def test_each_layer_draws_with_the_key_of_its_place_in_the_model(
    scan: bool, interval: int, groups: int | None
) -> None:
    """Also where the program is that of another virtual stage."""
    numbers = noisy(interval)
    program = trunk(numbers, scan=scan)
    assert tuple(program.segment.layers) == (1, 2, 3, 4)

    def run() -> jax.Array:
        params = program.segment.prepare(leaves(program.segment, numbers, 1))
        return program.run(params, one(X), context(numbers, program, 1), train=True)[0]

    assert_close(jax.jit(run)(), in_a_row(range(5, 9)))
    lengths = re.findall(r"\bscan\[.*?length=(\d+)", str(jax.make_jaxpr(run)()), re.S)
    assert lengths == ([] if groups is None else [str(groups)])


def test_no_two_of_these_layers_draw_alike() -> None:
    """So that the sum of what they add tells each of them from the others."""
    drawn = [(float(in_a_row(range(i, i + 1))[0]) - X) / PRIMES[i] for i in range(1, 9)]
    assert len({round(each, 3) for each in drawn}) == len(drawn)


def test_distances_of_indices() -> None:
    numbers = Numbers(
        [Gain, Scale, Gain, Gain, Scale, Gain, Scale, Scale, Gain],
        [0, 2, 5, 7, 9],
        2,
        schedule="1f1b-v",
    )
    starts = [1, 4, 6, 7]
    assert [int(trunk(numbers).offset(numbers.at(v))) for v in range(4)] == [
        start - 1 for start in starts
    ]
    third = SegmentProgram(numbers.blueprint, 2, [cut.trunk for cut in numbers.stage.cuts])
    assert [int(third.offset(numbers.at(v))) for v in range(4)] == [start - 6 for start in starts]


def test_gradients_of_scanned_layers_get_the_names_of_their_layers() -> None:
    numbers = noisy()
    program = trunk(numbers, scan=True)
    given = leaves(program.segment, numbers)
    assert [float(leaf) for leaf in given.values()] == [*PRIMES[1:5]]
    prepared = program.segment.prepare(given)
    assert {name: leaf.tolist() for name, leaf in prepared.items()} == {"noise": [*PRIMES[1:5]]}
    assert {name: float(leaf) for name, leaf in program.segment.by_name(prepared).items()} == {
        name: float(leaf) for name, leaf in given.items()
    }


def test_layers_in_a_row_keep_their_names() -> None:
    numbers = noisy()
    program = trunk(numbers)
    given = leaves(program.segment, numbers)
    assert program.segment.by_name(program.segment.prepare(given)) == given
    assert program.segment.struct.keys() == given.keys()


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("frozen", ["first", "second"])
def test_what_is_frozen_is_no_place_for_gradients(frozen: str, scan: bool) -> None:
    numbers = Numbers(
        [*[Pair] * 4, Gain], [0, 2, 5], 2, trainable=lambda name: not name.endswith(frozen)
    )
    program = trunk(numbers, scan=scan)
    names = sorted(name for name in program.segment.names if name.endswith(frozen))
    assert sorted(program.segment.frozen) == names
    assert len(names) == 2
    trained, held = program.segment.divided(leaves(program.segment, numbers))
    assert (sorted(held), sorted(trained)) == (names, sorted({*program.segment.names} - {*names}))
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(program.segment.sums)
    ]
    assert len(paths) == (1 if scan else 2)
    assert not any(frozen in path for path in paths)
    # Two pairs in a row: each number times the three others is its gradient.
    params = program.segment.prepare(leaves(program.segment, numbers))
    ahead = program.forward(params, one(X), context(numbers, program, 0))
    back = program.backward(params, ahead.residuals, [one(GRADIENT)], jnp.float32(0), split=False)
    found = {
        name: float(g) for name, g in program.segment.by_name(back.grads).items() if g is not None
    }
    a, b = PRIMES[:2]
    kept = "second" if frozen == "first" else "first"
    assert found == {
        f"trunk/0/0/{kept}": X * GRADIENT * a * b * b,
        f"trunk/0/1/{kept}": X * GRADIENT * a * a * b,
    }


@pytest.mark.parametrize("split", [False, True])
def test_a_reported_loss_is_one_more_output(split: bool) -> None:
    """It reports x * weight, and that times the other cotangent goes back besides."""
    schedule = "zero-bubble" if split else "1f1b"
    numbers = Numbers([*[Reporter] * 2, Gain], [0, 1, 3], 2, schedule=schedule)
    program = trunk(numbers, split=split)
    held = jax.tree.map(lambda x: jnp.full_like(x, 4), numbers.stage.collections.layout.zeros())
    full_context = (jnp.int32(0), KEY, {}, program.segment.collections(held))
    params = leaves(program.segment, numbers)
    ahead = program.forward(params, one(X), full_context)
    assert ahead.output.tolist() == [X * PRIMES[0]]
    assert ahead.reported.tolist() == [X * PRIMES[0], 100 * X]
    assert jax.tree.leaves(ahead.collections) == [4 + X]
    assert jax.tree.leaves(
        program.segment.collections(program.segment.put(held, ahead.collections))
    ) == [4 + X]
    back = program.backward(params, ahead.residuals, [one(GRADIENT)], jnp.float32(0.5), split=split)
    assert [float(g) for g in back.grads.values()] == [X * (GRADIENT + 0.5)]
    assert [float(g[0]) for g in back.input_grad] == [PRIMES[0] * (GRADIENT + 0.5)]


def test_the_vector_of_reports_is_as_long_as_the_longest() -> None:
    numbers = Numbers([Reporter, Scale, Reporter, Reporter, Scale, Scale, Gain], [0, 2, 5, 7], 3)
    each = [
        SegmentProgram(numbers.blueprint, v, [cut.prologue for cut in numbers.stage.cuts])
        for v in range(3)
    ]
    assert [len(program.aux.names) for program in each] == [2, 4, 0]
    assert [program.num_reported for program in each] == [4, 4, 4]


def test_a_split_backward_and_its_rest_are_the_whole() -> None:
    numbers = Numbers([*[Product] * 4, Gain], [0, 2, 5], 2, schedule="zero-bubble")
    program = trunk(numbers, split=True)
    params, (a, b) = leaves(program.segment, numbers), PRIMES[:2]
    ahead = program.forward(params, one(X), context(numbers, program, 0))
    whole, split = (
        program.backward(params, ahead.residuals, [one(GRADIENT)], jnp.float32(0), split=split)
        for split in (False, True)
    )
    wanted = {
        "trunk/0/0/matrix": X * GRADIENT * b * 100,
        "trunk/0/1/matrix": X * GRADIENT * a * 100,
    }
    assert {name: g.item() for name, g in whole.grads.items()} == wanted
    assert [leaf.shape for leaf in whole.pending] == [like.shape for like in program.pending]
    assert not any(leaf.any() for leaf in whole.pending)
    assert split.grads == dict.fromkeys(wanted)
    assert split.input_grad[0].tolist() == whole.input_grad[0].tolist() == [GRADIENT * a * b * 100]
    rest = program.backward_weight(params, ahead.residuals, split.pending)
    assert {name: g.item() for name, g in rest.items()} == wanted


def test_gradients_off_the_trunk_are_zero_where_none_is_given() -> None:
    numbers = Numbers(
        [Scale, Gain, Gain, Scale, Scale, Gain], [0, 1, 4, 6], 3, compute_dtype=jnp.bfloat16
    )
    program = SegmentProgram(numbers.blueprint, 1, [cut.prologue for cut in numbers.stage.cuts])
    assert program.segment.names == ("layers/1_Gain/gain", "layers/2_Gain/gain")
    for first, second in ((3.0, None), (None, 5.0), (3.0, 5.0)):
        given = {
            name: None if g is None else jnp.bfloat16(g)
            for name, g in zip(program.segment.names, (first, second), strict=True)
        }
        found = program.segment.off_trunk(given)
        assert numbers.grads(1, found) == {1: first or 0, 2: second or 0}
        # They are added to sums in float32, and are themselves half as wide.
        assert {buffer.dtype for buffer in found.packed.values()} == {jnp.dtype(jnp.bfloat16)}


def test_what_every_stage_holds_off_the_trunk_is_no_part_of_the_buffers() -> None:
    """A number that is tied on all stages, beside one that the first stage alone has."""
    tied = TiedLayerSpec("gain", Gain)
    numbers = Numbers([Gain, tied, Scale, tied, Scale, tied, Scale, Gain], [0, 3, 5, 8], 3)
    program = SegmentProgram(numbers.blueprint, 0, [cut.prologue for cut in numbers.stage.cuts])
    assert program.segment.names == ("layers/0_Gain/gain", "tied/gain/gain")
    for given in ({}, dict(zip(program.segment.names, (3.0, 5.0), strict=True))):
        found = program.segment.off_trunk({name: jnp.float32(g) for name, g in given.items()})
        assert {name: float(leaf) for name, leaf in found.stacked.items()} == {
            "tied/gain/gain": 5.0 if given else 0.0
        }
        assert found.packed["float32"].tolist() == [3.0 if given else 0.0]


def test_profiles_name_the_layers_of_all_virtual_stages_that_run_the_program() -> None:
    program = trunk(noisy())
    assert program._label(1, 2) == "2_Noise"
    program.serve(1, range(5, 9))
    assert program._label(1, 2) == "2_Noise,6_Noise"
    # The second layer of every group of two.
    assert program._label(1, None, 2) == "2_Noise,4_Noise,6_Noise,8_Noise"


def test_profiles_name_each_layer_once() -> None:
    numbers = noisy()
    program = trunk(numbers)
    params = leaves(program.segment, numbers)

    def run(params: Any) -> jax.Array:
        return program.run(params, one(X), context(numbers, program, 0), train=True)[0]

    names = [str(eqn.source_info.name_stack) for eqn in jax.make_jaxpr(run)(params).eqns]
    assert {name.split("/")[0] for name in names} == {"", *(f"{i}_Noise" for i in range(1, 5))}
