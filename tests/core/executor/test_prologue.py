"""Prologues by themselves: products of primes say which layers have run, and on what."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _numbers import PRIMES, Gain, Noise, Numbers, Product, Reporter, Scale

from jaxpipe import TiedLayerSpec
from jaxpipe.core.executor._prologue import Prologue

KEY = jax.random.key(3)
INPUT, ARRIVED, GRADIENT = 29.0, 31.0, 37.0

# Two chunks a stage. Prologues of one, two, one and no layer, on stages 0, 1, 0 and 1.
LAYERS = [Gain, Scale, Gain, Gain, Scale, Gain, Scale, Scale, Gain]
PARTS = [0, 2, 5, 7, 9]
PROLOGUES = [(0,), (2, 3), (5,), ()]


def summed(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    return outputs.sum() + labels.sum()


def one(value: float) -> jax.Array:
    return jnp.asarray([value])


def product(layers: tuple[int, ...]) -> float:
    found = 1.0
    for layer in layers:
        found *= PRIMES[layer]
    return found


@pytest.fixture(scope="module")
def numbers() -> Numbers:
    return Numbers(LAYERS, PARTS, 2, schedule="interleaved")


@pytest.fixture(scope="module")
def split() -> Numbers:
    """The same with matrices in the first prologue and first in the second one."""
    layers = [Product, Scale, Product, *LAYERS[3:]]
    return Numbers(layers, PARTS, 2, schedule="zero-bubble-v")


def forward(numbers: Numbers, v: int, arrived: float = ARRIVED) -> Any:
    at, stage = numbers.at(v), numbers.stage
    storage, held = (
        numbers.storage(stage.placement.locations[v][0]),
        stage.collections.layout.zeros(),
    )
    return stage.prologue.forward(at, storage, held, one(INPUT), one(arrived), (KEY, {}))


def backward(numbers: Numbers, v: int, *, split: bool) -> Any:
    """The input gradient, and gradients by layer of a backward and of the rest of a split one."""
    at, stage = numbers.at(v), numbers.stage
    place = stage.placement.locations[v][0]
    storage, residuals = numbers.storage(place), forward(numbers, v).residuals
    result = stage.prologue.backward(
        at, storage, residuals, [one(GRADIENT)], jnp.float32(0), split=split
    )
    grads = {} if result.grads is None else numbers.grads(place, result.grads)
    if not split:
        return float(result.input_grad[0][0]), grads, {}
    left = stage.prologue.backward_weight(at, storage, residuals, result.pending)
    return float(result.input_grad[0][0]), grads, numbers.grads(place, left)


def test_the_model_has_the_prologues_that_are_meant(numbers: Numbers, split: Numbers) -> None:
    for each in (numbers, split):
        assert [tuple(cut.prologue) for cut in each.stage.cuts] == PROLOGUES
    assert numbers.stage.placement.stages == (0, 1, 0, 1)
    assert split.stage.placement.stages == (0, 1, 1, 0)


@pytest.mark.parametrize("v", range(4))
def test_forward(numbers: Numbers, v: int) -> None:
    """The first takes the model's inputs, others what has arrived.

    In training gains are tenfold.
    """
    layers = PROLOGUES[v]
    result = forward(numbers, v)
    assert float(result.output[0]) == (ARRIVED if v else INPUT) * product(layers) * 10 ** len(
        layers
    )


@pytest.mark.parametrize("v", range(4))
def test_evaluation(numbers: Numbers, v: int) -> None:
    stage = numbers.stage
    storage, held = (
        numbers.storage(stage.placement.locations[v][0]),
        stage.collections.layout.zeros(),
    )
    output = stage.prologue.evaluate(
        numbers.at(v), storage, held, one(INPUT), one(ARRIVED), (None, {})
    )
    assert float(output[0]) == (ARRIVED if v else INPUT) * product(PROLOGUES[v])


def wanted_grads(numbers: Numbers, v: int) -> dict[int, float]:
    """Of every layer off the trunk of the stage: zero of those that are another virtual stage's."""
    place, layers = numbers.stage.placement.locations[v][0], PROLOGUES[v]
    stage = numbers.stage.params.stages[place]
    found = {
        i: 0.0 for i, names in stage.layers.items() if {*names.values()} & stage.off_trunk.keys()
    }
    for i in layers:
        others = tuple(j for j in layers if j != i)
        found[i] = GRADIENT * (ARRIVED if v else INPUT) * product(others) * 10.0 ** len(layers)
    return found


def input_grad(v: int) -> float:
    """The model's inputs have none."""
    return GRADIENT * product(PROLOGUES[v]) * 10.0 ** len(PROLOGUES[v]) if v else 0.0


@pytest.mark.parametrize("v", range(4))
def test_backward(numbers: Numbers, v: int) -> None:
    assert backward(numbers, v, split=False)[:2] == (input_grad(v), wanted_grads(numbers, v))


@pytest.mark.parametrize("v", range(4))
def test_a_split_backward_gives_each_gradient_once(split: Numbers, v: int) -> None:
    found, first, later = backward(split, v, split=True)
    assert found == input_grad(v)
    assert {i: first.get(i, 0.0) + g for i, g in later.items()} == wanted_grads(split, v)
    # Those of matrices wait, and no others.
    assert [i for i, g in later.items() if g] == [i for i in PROLOGUES[v] if i in (0, 2)]


def test_what_no_backward_gives_is_not_summed(numbers: Numbers, split: Numbers) -> None:
    assert numbers.stage.prologue.has_params
    assert split.stage.prologue.has_deferred
    assert not numbers.stage.prologue.has_deferred


# A prologue that draws random numbers, on the last two of three stages.
DRAWING = ([Scale, Gain, Noise, Scale, Gain, Noise, Scale, Gain], [0, 1, 4, 8], 3)


def test_alike_prologues_share_a_branch_and_no_random_key() -> None:
    numbers = Numbers(*DRAWING)
    prologue: Prologue = numbers.stage.prologue
    assert prologue._program_of == [0, 1, 1]
    # Profiles name the layers of both.
    assert prologue._programs[1]._label(0, 1) == "1_Gain,4_Gain"
    for v, layers in ((1, range(1, 3)), (2, range(4, 6))):
        views = [
            {"gain": jnp.float32(PRIMES[layers[0]])},
            {"noise": jnp.float32(PRIMES[layers[1]])},
        ]
        run = numbers.pipeline.module.run_layers(layers, views, train=True)
        wanted = run(one(ARRIVED), KEY, {}, [{}, {}])[0]
        assert forward(numbers, v).output.tolist() == wanted.tolist()


def tied() -> TiedLayerSpec:
    return TiedLayerSpec("gain", Gain)


@pytest.mark.parametrize(
    ("layers", "parts", "stages", "wanted"),
    [
        pytest.param(
            [Scale, Gain, Scale, Gain, Scale, Gain, Scale, Gain],
            [0, 1, 3, 5, 8],
            2,
            [0, 1, 1, 2],
            id="another slot",
        ),
        pytest.param(
            [Scale, Gain, Scale, Noise, Scale, Gain], [0, 1, 3, 6], 3, [0, 1, 2], id="another layer"
        ),
        pytest.param(
            [Scale, tied(), Scale, tied(), Scale, Gain],
            [0, 1, 3, 6],
            3,
            [0, 1, 2],
            id="a tied layer",
        ),
    ],
)
def test_prologues_that_differ_have_branches_of_their_own(
    layers: list[Any], parts: list[int], stages: int, wanted: list[int]
) -> None:
    numbers = Numbers(
        layers, parts, stages, schedule="interleaved" if len(parts) > stages + 1 else "1f1b"
    )
    assert numbers.stage.prologue._program_of == wanted


def test_without_prologues_the_first_takes_the_inputs_and_others_what_has_arrived() -> None:
    numbers = Numbers([Scale, Scale, Scale, Gain], [0, 1, 2, 4], 3)
    assert [float(forward(numbers, v).output[0]) for v in range(3)] == [INPUT, ARRIVED, ARRIVED]
    assert [backward(numbers, v, split=False)[0] for v in range(3)] == [GRADIENT] * 3


def test_chunks_that_are_never_first_do_not_look_at_the_inputs() -> None:
    numbers = Numbers([*[Scale] * 4, Gain], [0, 1, 2, 3, 5], 2, schedule="interleaved")
    assert [float(forward(numbers, v).output[0]) for v in range(4)] == [
        INPUT,
        ARRIVED,
        ARRIVED,
        ARRIVED,
    ]


def test_reports_and_collections_are_those_of_the_virtual_stage() -> None:
    """Of three prologues the second reports twice two values, the third once."""
    numbers = Numbers([Scale, Reporter, Reporter, Scale, Reporter, Scale, Gain], [0, 1, 4, 7], 3)
    kept, size = numbers.stage.collections, 100 * ARRIVED
    held = jax.tree.map(lambda x: jnp.full_like(x, 4), kept.layout.zeros())
    results = [
        numbers.stage.prologue.forward(
            numbers.at(v), numbers.storage(v), held, one(INPUT), one(ARRIVED), (KEY, {})
        )
        for v in range(3)
    ]
    a, b, c = PRIMES[1], PRIMES[2], PRIMES[4]
    assert [result.reported.tolist() for result in results] == [
        [0, 0, 0, 0],
        [ARRIVED * a, size, ARRIVED * a * b, size * a],
        [ARRIVED * c, size, 0, 0],
    ]
    layers = [[], [1, 2], [4]]
    found = [
        jax.tree.leaves(kept.views(v, layers[v], result.collections))
        for v, result in enumerate(results)
    ]
    assert found == [[], [4 + ARRIVED, 4 + ARRIVED * a], [4 + ARRIVED]]


def test_what_arrives_and_leaves_has_the_form_of_its_own_virtual_stage() -> None:
    """Outputs of one, two and three numbers, in one common form."""
    tile = [lambda x: jnp.tile(x, 2), lambda x: jnp.concatenate([x, 100 * x[:1]])]
    numbers = Numbers(
        [Gain, Gain, tile[0], Gain, tile[1], Gain, Gain], [0, 1, 3, 5, 7], 4, loss_fn=summed
    )
    stage = numbers.stage
    assert not any(cut.trunk for cut in stage.cuts)
    given = [one(INPUT), one(ARRIVED), jnp.asarray([3.0, 4.0]), jnp.asarray([5.0, 6.0, 7.0])]
    gains = [10 * PRIMES[i] for i in (0, 1, 3, 5)]
    wanted = [given[0], jnp.tile(given[1], 2), jnp.asarray([3.0, 4.0, 300.0]), given[3]]
    gradients = [
        one(2.0),
        jnp.asarray([2.0, 3.0]),
        jnp.asarray([2.0, 3.0, 5.0]),
        jnp.asarray([2.0, 3.0, 5.0]),
    ]
    pulled = [[0.0], [5.0], [502.0, 3.0], [2.0, 3.0, 5.0]]

    def both(v: int) -> tuple[jax.Array, Any]:
        at, storage = numbers.at(v), numbers.storage(v)
        packed = stage.activations.pack(v - 1, given[v]) if v else stage.activations.zeros()
        ahead = stage.prologue.forward(
            at, storage, stage.collections.layout.zeros(), one(INPUT), packed, (KEY, {})
        )
        gradient = stage.gradients.pack(v, [gradients[v]])
        back = stage.prologue.backward(
            at, storage, ahead.residuals, gradient, jnp.float32(0), split=False
        )
        # The input of the first has no gradient: zeros are sent.
        return stage.activations.unpack(v, ahead.output), stage.gradients.unpack(
            max(v - 1, 0), back.input_grad
        )

    for v, gain in enumerate(gains):
        output, (found,) = jax.jit(both, static_argnums=0)(v)
        assert output.tolist() == (wanted[v] * gain).tolist()
        assert found.tolist() == [gain * g for g in pulled[v]]
