"""Cutting a model for GPUs that are not there."""

import importlib.util
from pathlib import Path

import flax.linen as nn
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

import jaxpipe
from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.core.planner import Counted
from jaxpipe.core.planner._cut import costs_for_cut, cut_parts
from jaxpipe.errors import PartitionError

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, PLUGINS)),
        reason="needs the CUDA plugin: pip install jaxpipe[cuda12]",
    ),
]
TARGET = Path(jaxpipe.__file__).parent / "tools" / "plan" / "h200_target.txtpb"


def test_absent_devices_are_not_measured() -> None:
    description = topologies.get_topology_desc(
        platform="cuda", topology="1x1x2", target_config=TARGET.read_text()
    )
    mesh = Mesh(
        np.array(description.devices).reshape(2, 1),
        ("stage", "data"),
        axis_types=(AxisType.Auto,) * 2,
    )
    layers = [LayerSpec(nn.Dense, 64), LayerSpec(nn.Dense, 64), LayerSpec(nn.Dense, 512)]
    module = PipelineModule(layers, 2, partition_method="profile:flops")
    trace = module.trace(np.ones((4, 64), np.float32))
    costs = costs_for_cut(Counted(module, trace, None), mesh)
    assert costs.source == "counted for h200"
    assert cut_parts(module, trace, costs, 2, costs.signatures) == (0, 2, 3)
    with pytest.raises(
        PartitionError,
        match="a mesh of NVIDIA H200 devices that process 0 cannot run on. Use 'profile",
    ):
        costs_for_cut(Counted(module.replace(partition_method="profile"), trace, None), mesh)
