"""Which samples a process feeds, on meshes of devices that say of which process they are."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from _refusals import check_refused
from jax.sharding import Mesh

from jaxpipe.data import Shard, process_shard
from jaxpipe.errors import TopologyError


def _shard(
    axes: tuple[str, ...], processes: Any, monkeypatch: pytest.MonkeyPatch, own: int = 0
) -> Shard:
    """The shard of a process of a mesh.

    The mesh has these axes and at each place a device of the given process.
    """
    devices = np.vectorize(lambda process: SimpleNamespace(process_index=process), otypes=[object])(
        processes
    )
    mesh = SimpleNamespace(
        axis_names=axes, devices=devices, shape=dict(zip(axes, devices.shape, strict=True))
    )
    monkeypatch.setattr(jax, "process_index", lambda: own)
    return process_shard(cast(Mesh, mesh))


TWO = ("stage", "data")
THREE = ("stage", "data", "fsdp")


@pytest.mark.parametrize(
    ("axes", "processes", "blocks"),
    [
        # A process for each place along `fsdp`.
        (THREE, [[[0, 1]]], [range(1), range(1, 2)]),
        (THREE, [[[0, 1], [2, 3]]], [range(1), range(1, 2), range(2, 3), range(3, 4)]),
        # One for each replica, whose places along `fsdp` are its devices.
        (THREE, [[[0, 0], [1, 1]]], [range(2), range(2, 4)]),
        # One for each stage: both feed all samples.
        (THREE, [[[0, 0], [0, 0]], [[1, 1], [1, 1]]], [range(4), range(4)]),
        # All places of `model` along one sample have the same ones.
        ((*THREE, "model"), [[[[0, 1], [2, 3]]]], [range(1), range(1), range(1, 2), range(1, 2)]),
        # `fsdp` of length 1, and none.
        (THREE, [[[0], [1]]], [range(1), range(1, 2)]),
        (TWO, [[0, 0, 1, 1]], [range(2), range(2, 4)]),
    ],
)
def test_samples_go_by_replicas_and_then_by_places_of_fsdp(
    axes: tuple[str, ...], processes: Any, blocks: list[range], monkeypatch: pytest.MonkeyPatch
) -> None:
    distinct = sorted({(block.start, block.stop) for block in blocks})
    for own, block in enumerate(blocks):
        index = distinct.index((block.start, block.stop))
        assert _shard(axes, processes, monkeypatch, own) == Shard(index, len(distinct), block)


@pytest.mark.parametrize("axes", [TWO, THREE])
def test_one_process_feeds_all(axes: tuple[str, ...]) -> None:
    devices = np.array(jax.devices()[:8]).reshape((2, 4) if axes == TWO else (2, 2, 2))
    assert process_shard(Mesh(devices, axes)) == Shard(0, 1, range(4))


def test_blocks_that_are_not_equal_or_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for processes, shown in (
        ([[[0, 1], [0, 1]]], r"process 0: \[0, 2\], process 1: \[1, 3\] of 4"),
        ([[[0, 1], [1, 1]]], r"process 0: \[0\], process 1: \[1, 2, 3\] of 4"),
        ([[[0, 0], [1, 1]], [[0, 1], [1, 1]]], r"process 0: \[0, 1\], process 1: \[1, 2, 3\] of 4"),
    ):
        words = rf"equal blocks of neighbouring replicas, .* got {shown}\. Use jaxpipe\.mesh"
        check_refused(TopologyError, [(words, _shard)], THREE, processes, monkeypatch)
