"""Accelerators by name, their links, and what they refuse."""

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from _refusals import check_refused

from jaxpipe import PipeDataParallelTopology, PipeModelDataParallelTopology
from jaxpipe.config import PipelineConfig
from jaxpipe.core.planner import (
    ASSUMED,
    HARDWARE,
    Hardware,
    absent_devices,
    communicators,
    named_hardware,
    read_hardware,
    reference_hardware,
    usable_bytes,
)
from jaxpipe.core.planner._calibrate import hardware_of, limit_of
from jaxpipe.errors import ConfigError
from jaxpipe.topology import make_pipeline_mesh

MINE = Hardware("mine", 100.0, 50.0, 10.0, 8.0, 2.0, wire_share=0.5, latency_s=1.0)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v4", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_device_kinds(kind: str, name: str | None) -> None:
    assert named_hardware(kind) == (None if name is None else HARDWARE[name])


def test_links_inside_a_host_and_between_hosts() -> None:
    assert MINE.wire_s(8.0, inside_host=True) == 1.0 + 8.0 / (8.0 * 0.5)
    assert MINE.wire_s(8.0, inside_host=False) == 1.0 + 8.0 / 2.0
    assert [MINE.host_of(device) for device in (0, 7, 8, 17)] == [0, 0, 1, 2]
    assert [HARDWARE["gh200"].host_of(device) for device in (0, 1)] == [0, 1]


def test_memory_is_shared_with_communicators() -> None:
    mine = dataclasses.replace(MINE, usable_share=0.5, communicator_bytes=4.0)
    assert [mine.usable_bytes(), mine.usable_bytes(3)] == [25.0, 13.0]


def test_ideal_hardware_reaches_its_peaks() -> None:
    ideal = MINE.ideal
    assert (ideal.gemm_share, ideal.attention_share, ideal.traffic_share) == (1.0, 1.0, 1.0)
    assert ideal.wire_s(8.0, inside_host=True) == 1.0
    assert (ideal.branch_s, ideal.usable_share) == (0.0, MINE.usable_share)


def test_other_assumptions() -> None:
    fair = MINE.assuming("fair")
    assert {name: getattr(fair, name) for name in ASSUMED["fair"]} == ASSUMED["fair"]
    assert MINE.assuming({"latency_s": 0.0, "gemm_share": 1.0}).gemm_share == 1.0
    check_refused(
        ConfigError,
        [
            (
                "'fair', 'pessimistic' or a mapping.* got assume='best'. Write",
                lambda: MINE.assuming("best"),
            ),
            (
                "name fields of Hardware.*but got 'gem_share'. Corr",
                lambda: MINE.assuming({"gem_share": 1}),
            ),
            ("but got 'name'. Correct or", lambda: MINE.assuming({"name": 1})),
        ],
    )


def test_numbers_that_no_hardware_has() -> None:
    change = functools.partial(dataclasses.replace, MINE)
    none: Any = None
    table = [
        *(
            (
                rf"flops_per_s of hardware 'mine' must be a positive number, .*={value}\. Pass",
                {"flops_per_s": value},
            )
            for value in (0.0, -1.0, math.inf, math.nan, none, True)
        ),
        ("network_bytes_per_s of .* a positive number, but got", {"network_bytes_per_s": 0}),
        ("latency_s of .* must be at least 0, but got latency_s=-1", {"latency_s": -1}),
        ("communicator_bytes of .* must be at least 0", {"communicator_bytes": -1.0}),
        (
            r"must be a whole number, but got devices_per_host=7.5\. Round",
            {"devices_per_host": 7.5},
        ),
        ("devices_per_host of .* positive", {"devices_per_host": 0}),
        ("wire_share of .* at most 1, but got wire_share=1.01. Div", {"wire_share": 1.01}),
        ("usable_share of .* positive number", {"usable_share": 0.0}),
    ]
    check_refused(
        ConfigError, [(words, functools.partial(change, **given)) for words, given in table]
    )
    fine = change(latency_s=0, communicator_bytes=0, wire_share=1, devices_per_host=4.0)
    assert fine.devices_per_host == 4
    assert type(fine.devices_per_host) is int


def test_hardware_is_read_with_the_number_of_devices() -> None:
    for text in ("h200:64", " H200 : 64 "):
        assert read_hardware(text) == (HARDWARE["h200"], 64)
    assert read_hardware((MINE, 3)) == (MINE, 3)
    pair = "must be a pair of a Hardware and a positive number of devices, but got"
    wrong: list[tuple[str, Any]] = [
        *(
            (f"{pair} .*", each)
            for each in ((MINE, 0), (MINE, True), (MINE,), ("h200", 3), (MINE, 1, 2))
        ),
        *(
            ("'NAME:NUMBER', but got hardware=", each)
            for each in ("h200", "h200:0", "h200:-1", ":2", 3)
        ),
        ("got 'h20'. Did you mean 'h200'. If not, plan for", "h20:2"),
        (r"got 'zzz'. Use one of these, or, plan.*HARDWARE\['zzz'\] = ", "zzz:2"),
    ]
    check_refused(
        ConfigError, [(words, functools.partial(read_hardware, given)) for words, given in wrong]
    )


def test_absent_devices_lie_on_hosts() -> None:
    devices = absent_devices(dataclasses.replace(MINE, devices_per_host=2), 5)
    assert [device.id for device in devices] == [0, 1, 2, 3, 4]
    assert [device.process_index for device in devices] == [0, 0, 1, 1, 2]
    assert {device.device_kind for device in devices} == {"mine"}
    assert devices[0].client.local_devices() == []
    assert absent_devices(HARDWARE["v5e"], 1)[0].client.platform == "tpu"


def mesh(stages: int, data: int, model: int = 1) -> jax.sharding.Mesh:
    """Of H200s that are not there."""
    topology = (
        PipeDataParallelTopology(stages, data)
        if model == 1
        else PipeModelDataParallelTopology(num_pp=stages, num_mp=model, num_dp=data)
    )
    return make_pipeline_mesh(topology, absent_devices(HARDWARE["h200"], stages * data * model))


def test_each_axis_has_a_communicator_and_so_have_all_devices() -> None:
    assert communicators(mesh(1, 1)) == ()
    assert communicators(mesh(4, 1)) == ("stage",)
    assert communicators(mesh(1, 2)) == ("data",)
    assert communicators(mesh(4, 2)) == ("all devices", "stage", "data")
    assert set(communicators(mesh(2, 2, 2))) == {"all devices", "stage", "data", "model"}


def test_memory_that_communicators_fill_is_refused() -> None:
    h200 = HARDWARE["h200"]
    assert usable_bytes(h200, mesh(4, 2)) == 0.92 * 141e9 - 3 * 0.8e9
    # The limit of devices that are not there is what is usable; one that is set comes first.
    assert limit_of(PipelineConfig(), mesh(4, 2)) == usable_bytes(h200, mesh(4, 2))
    assert limit_of(PipelineConfig(memory_limit_gb=2.5), mesh(4, 2)) == 2.5e9
    full = dataclasses.replace(MINE, usable_share=0.5, memory_bytes=6.0, communicator_bytes=1.0)
    words = (
        r"more than its communicators, but got memory_bytes=6 and 3 of communicator_bytes=1\. Set"
    )
    check_refused(ConfigError, [(words, functools.partial(usable_bytes, full, mesh(4, 2)))])
    assert usable_bytes(full, mesh(4, 1)) == 2.0


@pytest.mark.parametrize(
    ("stats", "limit"),
    [({"bytes_limit": 7}, 5), ({"bytes_limit": 3}, 3), ({"in_use": 1}, None), (None, None)],
)
def test_the_limit_of_devices_that_are_here_is_the_least_that_one_reports(
    stats: Any, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process reports 5 bytes."""
    here = SimpleNamespace(memory_stats=lambda: stats)
    room = "jaxpipe.core.planner._calibrate"
    monkeypatch.setattr(f"{room}.runnable_devices", lambda mesh: [here])
    monkeypatch.setattr(f"{room}.agreed", lambda own, pick: pick([own, 5]))
    assert limit_of(PipelineConfig(), mesh(2, 1)) == limit
    assert limit_of(PipelineConfig(memory_limit_gb=2.5), mesh(2, 1)) == 2.5e9


def test_unknown_devices_are_counted_as_one_that_is_known() -> None:
    assert reference_hardware(mesh(2, 1)) == HARDWARE["h200"]
    unknown = make_pipeline_mesh(PipeDataParallelTopology(2, 1), absent_devices(MINE, 2))
    assert reference_hardware(unknown) == HARDWARE["h100"]
    assert hardware_of(unknown) == HARDWARE["h100"]
