"""Meshes of models."""

from typing import Any

import flax.linen as nn
import jax
import pytest

from jaxpipe import PipelineModule, mesh_for
from jaxpipe.errors import LaunchError


def test_a_mesh_without_devices_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = jax.devices()[:2]

    def absent(*_: Any) -> Any:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    for name in ("devices", "device_count"):
        monkeypatch.setattr(jax, name, absent)
    module = PipelineModule([nn.Dense(4), nn.Dense(4)], num_stages=2)
    with pytest.raises(LaunchError, match=r"backend 'cuda'\. .* run pip install"):
        mesh_for(module)
    assert mesh_for(module, devices).shape == {"stage": 2, "data": 1}
