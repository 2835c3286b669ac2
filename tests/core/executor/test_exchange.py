"""Sends and receives, on a ring of four stages whose values say where they were computed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.core.executor._exchange import Channel, exchange
from jaxpipe.core.executor._packing import Packing
from jaxpipe.schedules import TransferBuffers, Transfers

STAGES = 4
DOWN, UP = ((0, 1), (1, 2), (2, 3)), ((1, 0), (2, 1), (3, 2))
IDLE: Transfers[int] = Transfers(*[-1] * 9)


def on_stages(function: Callable[[jax.Array], Any]) -> Any:
    """What a function of the stage gives on each of them, `[stage, ...]`."""
    mesh = jax.make_mesh((STAGES,), ("stage",), devices=jax.devices()[:STAGES])

    def run() -> Any:
        return jax.tree.map(lambda x: x[None], function(jax.lax.axis_index("stage")))

    return jax.tree.map(
        np.asarray, jax.jit(jax.shard_map(run, mesh=mesh, out_specs=P("stage"), check_vma=False))()
    )


def value_of(stage: jax.Array) -> jax.Array:
    return 10.0 + stage.astype(jnp.float32)


def test_values_go_one_stage_on() -> None:
    got = on_stages(lambda stage: exchange(value_of(stage), {1: DOWN}, stage, stage - 1, STAGES))
    assert got[1:].tolist() == [10, 11, 12]


def test_each_stage_takes_what_comes_from_the_stage_it_receives_from() -> None:
    """Where values go both ways in one tick.

    Stages 0 and 1 receive from below, 2 and 3 from above.
    """
    recv_from = jnp.asarray([1, 2, 1, 2])
    got = on_stages(
        lambda stage: exchange(value_of(stage), {1: DOWN, 3: UP}, stage, recv_from[stage], STAGES)
    )
    assert got.tolist() == [11, 12, 11, 12]


def channel(
    depth: tuple[int, int, int],
    unbuffered: tuple[bool, bool, bool] = (False,) * 3,
    *,
    early: bool = False,
) -> Channel:
    form = Packing([jax.ShapeDtypeStruct((), jnp.float32)])
    return Channel(
        form, STAGES, TransferBuffers(*depth), TransferBuffers(*unbuffered), sends_early=early
    )


def row(**slots: Any) -> Transfers[jax.Array]:
    return jax.tree.map(jnp.int32, IDLE._replace(**slots))


def test_buffers_that_are_not_needed_hold_nothing() -> None:
    assert jax.tree.map(jnp.shape, channel((2, 3, 1)).empty()) == ((2,), (3,), (1,))
    assert jax.tree.map(jnp.shape, channel((2, 3, 0), (True, True, False)).empty()) == ((), (), ())


@pytest.mark.parametrize("early", [False, True])
def test_a_value_is_taken_in_the_tick_after_it_was_computed(early: bool) -> None:
    """Nothing waits: it travels at the end of its tick or at the beginning of the next."""
    link = channel((1, 1, 0), (True, True, False), early=early)

    def two_ticks(stage: jax.Array) -> jax.Array:
        first = row(write=0, next_recv_from=stage - 1)
        second = row(send=0, recv=0, read=0, recv_from=stage - 1)
        buffers = link.send(link.empty(), {1: DOWN}, first, stage, value_of(stage))
        return link.recv(buffers, {1: DOWN}, second, stage)[0]

    assert on_stages(two_ticks)[1:].tolist() == [10, 11, 12]


def test_values_wait_in_the_slots_that_the_program_names() -> None:
    """Two are computed and wait.

    The second is sent first, and is taken a tick after it has arrived.
    """
    link = channel((2, 2, 0))

    def ticks(stage: jax.Array) -> tuple[jax.Array, jax.Array]:
        buffers = link.send(link.empty(), {}, row(write=0), stage, value_of(stage))
        buffers = link.send(buffers, {}, row(write=1), stage, value_of(stage) + 100)
        _, buffers = link.recv(buffers, {1: DOWN}, row(send=1, recv=1, recv_from=stage - 1), stage)
        early, buffers = link.recv(
            buffers, {1: DOWN}, row(send=0, recv=0, recv_from=stage - 1, read=1), stage
        )
        late, _ = link.recv(buffers, {}, row(read=0), stage)
        return early, late

    early, late = on_stages(ticks)
    assert early[1:].tolist() == [110, 111, 112]
    assert late[1:].tolist() == [10, 11, 12]


def test_chunks_of_one_stage_hand_on_without_a_send() -> None:
    link = channel((1, 1, 1))

    def ticks(stage: jax.Array) -> jax.Array:
        buffers = link.send(link.empty(), {}, row(local_write=0), stage, value_of(stage))
        return link.recv(buffers, {}, row(local_read=0), stage)[0]

    assert on_stages(ticks).tolist() == [10, 11, 12, 13]


def test_idle_ticks_leave_buffers_as_they_are() -> None:
    link = channel((1, 1, 1))

    def ticks(stage: jax.Array) -> Any:
        before = link.send(link.empty(), {}, row(write=0, local_write=0), stage, value_of(stage))
        after = link.send(before, {}, row(), stage, jnp.float32(-1))
        return link.recv(after, {1: DOWN}, row(recv_from=stage - 1), stage)[1]

    received, sent, local = on_stages(ticks)
    assert received.tolist() == [[0]] * STAGES
    assert sent.tolist() == local.tolist() == [[10], [11], [12], [13]]
