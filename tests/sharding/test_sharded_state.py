"""What a device holds of annotated leaves.

Its share of masters, moments and gradients, never the whole.
"""

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from _annotated import ANNOTATED, Sharded, Spec
from _covering import sweep
from _oracle import sequential_model
from _tolerances import STATE_BYTES

ADAM = optax.adam(1e-2)


def annotated_leaves(case: Sharded) -> dict[str, tuple[tuple[int, ...], Spec]]:
    """Shapes and specs of the leaves that are sharded, by path."""
    found, specs = {}, ANNOTATED[case.annotated].specs
    for keys, leaf in jax.tree.leaves_with_path(sequential_model(case.model).params):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        spec = next((spec for end, spec in specs.items() if path.endswith(f"/{end}")), None)
        if spec is not None:
            found[path] = (leaf.shape, spec)
    assert len(found) >= len(specs)
    return found


def shard_of(shape: tuple[int, ...], spec: Spec, axes: dict[str, int]) -> tuple[int, ...]:
    """By hand: what one rank of the automatic axes holds."""
    names = [name if isinstance(name, tuple) else (name,) for name in spec]
    lengths = [math.prod(axes.get(each, 1) for each in name if each) for name in names]
    return tuple(size // length for size, length in zip(shape, lengths, strict=True))


def check_shards(case: Sharded, tree: Any) -> None:
    """Every array that has the form of an annotated leaf is sharded as the leaf says.

    Every form is there.
    """
    wanted = {
        shape: shard_of(shape, spec, dict(case.axes))
        for shape, spec in annotated_leaves(case).values()
    }
    found = set()
    for array in jax.tree.leaves(tree):
        for shape, shard in wanted.items():
            if array.shape[-len(shape) :] == shape:
                found.add(shape)
                assert array.sharding.shard_shape(array.shape)[-len(shape) :] == shard, (
                    array.shape,
                    array.sharding,
                )
    assert found == set(wanted)


def device_bytes(tree: Any) -> int:
    """Bytes on the device that has most."""
    used: dict[Any, int] = {}
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            used[shard.device] = used.get(shard.device, 0) + shard.data.nbytes
    return max(used.values())


def largest_stage_bytes(case: Sharded, boundaries: tuple[int, ...]) -> int:
    """By hand: float32 parameters of the largest stage as one rank holds them."""
    leaves = annotated_leaves(case)
    sizes = [0] * case.stages
    for keys, leaf in jax.tree.leaves_with_path(sequential_model(case.model).params):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        shape = shard_of(*leaves[path], dict(case.axes)) if path in leaves else leaf.shape
        if path.startswith("tied/"):
            holders = [0, case.stages - 1]
        else:
            index = int(path.split("/")[1].split("_")[0])
            holders = [next(s for s in range(case.stages) if index < boundaries[s + 1])]
        for stage in set(holders):
            sizes[stage] += 4 * math.prod(shape)
    return max(sizes)


@pytest.mark.parametrize(
    "case",
    sweep(
        0,
        [
            Sharded(annotated="block", data=2, optimizer=ADAM, cut="trunk"),
            Sharded(annotated="block", axes=(("model", 4),), optimizer=ADAM, cut="trunk"),
            Sharded(annotated="logical", stages=1, data=2, optimizer=ADAM),
            Sharded(annotated="nnx", data=2, optimizer=ADAM, schedule="1f1b-v"),
            Sharded(annotated="tied", data=2, optimizer=ADAM, cut="trunk"),
            Sharded(
                annotated="experts", data=2, axes=(("expert", 2),), optimizer=ADAM, cut="trunk"
            ),
            Sharded(
                annotated="inner", axes=(("model", 2), ("expert", 2)), optimizer=ADAM, cut="trunk"
            ),
            Sharded(annotated="mixed", data=2, optimizer=ADAM, cut="front"),
            Sharded(annotated="scanned", data=2, optimizer=ADAM),
            Sharded(
                annotated="joint", axes=(("model", 2), ("expert", 2)), optimizer=ADAM, cut="trunk"
            ),
            Sharded(annotated="fsdp", data=2, axes=(("fsdp", 2),), optimizer=ADAM, cut="trunk"),
        ],
    ),
    ids=str,
)
def test_masters_moments_and_gradients_are_sharded(case: Sharded) -> None:
    pipeline = case.pipeline()
    state = pipeline.init()
    jax.tree.map(
        np.testing.assert_array_equal,
        pipeline.params_tree(state.params),
        sequential_model(case.model).params,
    )
    _, gradients, _ = pipeline.gradients(state, case.batch())
    check_shards(case, gradients)
    state, _ = pipeline.step(state, case.batch())
    for tree in (state.params, state.opt_state):
        check_shards(case, tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(1, ["experts", "tied"]))
def test_a_device_holds_its_share_of_its_stage(name: str) -> None:
    """By hand, but for the ends, which are as long on every stage as on the longest."""
    axes = (("expert", 2),) if name == "experts" else (("model", 2),)
    case = Sharded(annotated=name, data=2, axes=axes, optimizer=ADAM, cut="trunk")
    pipeline = case.pipeline()
    state, _ = pipeline.step(pipeline.init(), case.batch())
    limit = STATE_BYTES * largest_stage_bytes(case, pipeline.plan.parts)
    assert device_bytes(state.params) <= limit
    assert device_bytes(state.opt_state) <= 2 * limit


@pytest.mark.soak
@pytest.mark.parametrize("name", sweep(1, ["tied", "experts", "block", "nnx"]))
def test_zero_divides_the_shares_over_the_replicas(name: str) -> None:
    axes = (("expert", 2),) if name == "experts" else (("model", 2),)
    used = {}
    for stage in (0, 1):
        case = Sharded(
            annotated=name, data=2, axes=axes, optimizer=ADAM, settings={"zero_stage": stage}
        )
        pipeline = case.pipeline()
        state, _ = pipeline.step(pipeline.init(), case.batch())
        used[stage] = np.array([device_bytes(state.params), device_bytes(state.opt_state)])
    assert (used[1] <= used[0] / 2 * STATE_BYTES + 512).all()


@pytest.mark.soak
def test_collections_are_sharded_as_they_say() -> None:
    case = Sharded(annotated="stats", data=2, optimizer=ADAM)
    pipeline = case.pipeline()
    state, _ = pipeline.step(pipeline.init(), case.batch())
    held = {
        array.sharding.shard_shape(array.shape)[-1] for array in jax.tree.leaves(state.collections)
    }
    assert 24 // 2 in held
    tree = pipeline.states.collections_tree(state.collections)
    assert {leaf.shape for leaf in jax.tree.leaves(tree)} == {(24,), ()}


@pytest.mark.soak
@pytest.mark.parametrize("size", sweep(1, [2, 4]))
def test_a_sharded_residual_stream_makes_rings_and_exchanges_smaller(size: int) -> None:
    """What waits and what travels between stages is divided by the axis."""
    used = {}
    for name in ("deep", "sequence"):
        case = Sharded(
            annotated=name, axes=(("model", size),), optimizer=ADAM, cut="trunk", microbatches=8
        )
        pipeline = case.pipeline()
        program = (
            pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct).compile().as_text()
        )
        sent = [
            line
            for line in program.splitlines()
            if " collective-permute(" in line or "permute-start(" in line
        ]
        assert sent
        used[name] = {line.split("=")[1].split("{")[0].strip() for line in sent if "f32" in line}
    # [microbatch, sequence, features] of one replica, whole and in slices along the sequence.
    assert any("[2,4,8]" in form for form in used["deep"])
    assert not any("[2,4,8]" in form for form in used["sequence"])
    assert any(f"[2,{4 // size},8]" in form for form in used["sequence"])
