"""Seconds of kernels and collectives, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxpipe.core.planner import Hardware, bytes_s, collective_s, kernel_s
from jaxpipe.core.planner._costs import axes_inside, look_once
from jaxpipe.core.planner._roofline import Time, time_of
from jaxpipe.programs.jaxpr import Kernel

# 50 operations of products, 25 of attention and 5 bytes a second; 2 bytes to a neighbour, 1 to
# another host.
MINE = Hardware(
    *("mine", 100.0, 1e9, 10.0, 4.0, 1.0),
    gemm_share=0.5,
    attention_share=0.25,
    traffic_share=0.5,
    wire_share=0.5,
    latency_s=0.0,
)
AXES = {"model": (4, True), "far": (2, False), "fsdp": (2, True)}


def test_a_kernel_takes_its_work_or_its_bytes() -> None:
    assert bytes_s(MINE, 20.0) == 4.0
    assert kernel_s(MINE, 100.0, 0.0, 5.0) == 2.0
    assert kernel_s(MINE, 0.0, 100.0, 5.0) == 4.0
    assert kernel_s(MINE, 100.0, 100.0, 5.0) == 6.0
    assert kernel_s(MINE, 100.0, 0.0, 50.0) == 10.0


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("collective-permute", 1.0),
        ("all-reduce", 2 * 3 / 4),
        ("all-gather", 3 / 4),
        ("reduce-scatter", 3 / 4),
        ("all-to-all", 3 / 4),
    ],
)
def test_collectives_move_their_share(kind: str, share: float) -> None:
    assert collective_s(MINE, kind, 80.0, 4, inside_host=True) == share * 80.0 / 2
    assert collective_s(MINE, kind, 80.0, 4, inside_host=False) == share * 80.0
    assert collective_s(MINE, kind, 80.0, 1, inside_host=True) == 0.0


@pytest.mark.parametrize(
    ("kernels", "wanted"),
    [
        ([Kernel("product", 100, 5, times=3)], Time(6.0, 300.0, 300.0)),
        # Of 32 bits at half the speed.
        ([Kernel("product", 100, 5, is_narrow=False)], Time(4.0, 200.0, 200.0)),
        ([Kernel("product", 100, 50)], Time(10.0, 100.0, 100.0)),
        ([Kernel("attention", 100, 5, times=2, masked_flops=60)], Time(8.0, 200.0, 320.0)),
        (
            [Kernel("attention", 100, 5, is_narrow=False, masked_flops=60)],
            Time(8.0, 200.0, 320.0),
        ),
        ([Kernel("other", 0, 20, times=3)], Time(12.0)),
        ([Kernel("reduce", 0, 80, axis="model", times=2)], Time(2 * 2 * 3 / 4 * 40.0)),
        ([Kernel("gather", 0, 80, axis="model")], Time(3 / 4 * 40.0)),
        ([Kernel("exchange", 0, 80, axis="model")], Time(3 / 4 * 40.0)),
        ([Kernel("shift", 0, 80, axis="model")], Time(40.0)),
        ([Kernel("reduce", 0, 80, axis="far")], Time(80.0)),
        ([Kernel("reduce", 0, 80, axis="none")], Time(0.0)),
        # Sums over `fsdp`, of which a device keeps its share, lie under products but not under
        # other kernels.
        ([Kernel("reduce", 0, 80, axis="fsdp")], Time(20.0)),
        (
            [Kernel("reduce", 0, 80, axis="fsdp"), Kernel("product", 500, 5)],
            Time(20.0, 500.0, 500.0),
        ),
        ([Kernel("reduce", 0, 80, axis="fsdp"), Kernel("product", 5000, 5)], Time(100.0, 5e3, 5e3)),
        ([Kernel("reduce", 0, 80, axis="fsdp"), Kernel("other", 0, 50)], Time(30.0)),
        ([], Time()),
    ],
    ids=repr,
)
def test_kernels_one_after_another(kernels: list[Kernel], wanted: Time) -> None:
    assert time_of(MINE, kernels, AXES) == wanted


def test_an_axis_lies_in_a_host_with_those_inside_it() -> None:
    """Devices are numbered along the last axis first."""

    def found(**shape: int) -> dict[str, tuple[int, bool]]:
        trace: Any = SimpleNamespace(mesh=SimpleNamespace(shape=shape, axis_names=tuple(shape)))
        return dict(axes_inside(trace, MINE))

    assert found(stage=4, data=2) == {}
    assert found(stage=4, data=2, fsdp=2, model=4) == {"fsdp": (2, True), "model": (4, True)}
    assert found(stage=4, data=2, fsdp=4, model=4) == {"fsdp": (4, False), "model": (4, True)}
    assert found(stage=1, model=4, data=4) == {"model": (4, False)}


def test_equal_layers_are_looked_at_once() -> None:
    seen: list[int] = []
    found = look_once(["a", "b", "a", "c", "b"], lambda index: seen.append(index) or 10 * index)
    assert found == [0, 10, 0, 30, 10]
    assert seen == [0, 1, 3]
