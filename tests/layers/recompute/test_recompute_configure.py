import json
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
from _refusals import assert_refused
from jax.sharding import AxisType

from jaxpipe import checkpointing
from jaxpipe.config import ConfigWarning
from jaxpipe.errors import ConfigError
from jaxpipe.layers.recompute import RecomputeSettings
from jaxpipe.layers.recompute._configure import check_host_memory
from jaxpipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology

pytestmark = pytest.mark.filterwarnings(
    "ignore:No effect. checkpoint_in_cpu .*the devices are CPUs"
)


@pytest.fixture(autouse=True)
def _own_settings() -> Iterator[None]:
    with checkpointing.use_settings(RecomputeSettings()):
        yield


def _section(**keys: Any) -> dict[str, Any]:
    return {"activation_checkpointing": keys}


def _now() -> dict[str, bool]:
    settings = checkpointing.current_settings()
    return {
        "partition_activations": settings.partition_activations,
        "checkpoint_in_cpu": settings.checkpoint_in_cpu,
        "profile": settings.profile,
    }


def test_nothing_is_configured_at_first() -> None:
    assert not checkpointing.is_configured()
    assert checkpointing.current_settings() == RecomputeSettings()


def test_defaults() -> None:
    checkpointing.configure(None)
    assert checkpointing.is_configured()
    assert _now() == {"partition_activations": False, "checkpoint_in_cpu": False, "profile": False}


def test_the_section_counts() -> None:
    checkpointing.configure(
        None, _section(partition_activations=True, cpu_checkpointing=True, profile=True)
    )
    assert _now() == {"partition_activations": True, "checkpoint_in_cpu": True, "profile": True}


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(_section(profile=True)))
    checkpointing.configure(None, file)
    assert _now()["profile"]


def test_explicit_arguments_override_the_section() -> None:
    config = _section(partition_activations=True, cpu_checkpointing=True, profile=False)
    checkpointing.configure(None, config, partition_activations=False, profile=True)
    assert _now() == {"partition_activations": False, "checkpoint_in_cpu": True, "profile": True}


def test_explicit_arguments_override_one_by_one_through_positions() -> None:
    checkpointing.configure(None, None, True, None, None, True, None, True)
    assert _now() == {"partition_activations": True, "checkpoint_in_cpu": True, "profile": True}


def test_each_call_starts_from_the_defaults() -> None:
    checkpointing.configure(None, profile=True)
    checkpointing.configure(None, partition_activations=True)
    assert _now() == {"partition_activations": True, "checkpoint_in_cpu": False, "profile": False}


def test_reset_keeps_the_settings() -> None:
    checkpointing.configure(None, profile=True)
    checkpointing.reset()
    assert checkpointing.is_configured()
    assert _now()["profile"]


def test_partition_activations_in_checkpoint_leaves_the_rest() -> None:
    checkpointing.configure(None, profile=True)
    checkpointing.partition_activations_in_checkpoint(True)
    assert _now() == {"partition_activations": True, "checkpoint_in_cpu": False, "profile": True}
    checkpointing.partition_activations_in_checkpoint(False)
    assert not _now()["partition_activations"]


def test_a_refused_call_changes_nothing() -> None:
    refused, configure = partial(assert_refused, ConfigError), checkpointing.configure
    configure(None, profile=True)
    words = "partition_activations=False. Leave contiguous_checkpointing"
    refused(words, configure, None, contiguous_checkpointing=True, num_checkpoints=2)
    words = "num_checkpoints=None. Give num_checkpoints"
    refused(words, configure, None, partition_activations=True, contiguous_checkpointing=True)
    for name in ("partition_activations", "contiguous_checkpointing", "checkpoint_in_cpu"):
        refused(f"{name}=1. Pass a boolean", configure, None, **{name: 1})
    refused("profile=1. Pass a boolean", configure, None, profile=1)
    for value in (0, True, "3", 1.5):
        words = f"num_checkpoints={value!r} ... Give the number of recomputed groups"
        refused(words, configure, None, num_checkpoints=value)
    words = "partition_activations=None. Pass a boolean"
    refused(words, checkpointing.partition_activations_in_checkpoint, None)
    words = "activation_checkpointing.cpu_checkpoint"
    refused(words, configure, None, _section(cpu_checkpoint=True))
    words = "mpu_ must be None ... got a dict. Pass a configuration as deepspeed_config="
    refused(words, configure, _section(profile=True))
    for kind in ("unpinned_host", "pinned_host"):
        words = f"backend='old' with memories ['{kind}'] ... Leave cpu_checkpointing"
        refused(words, check_host_memory, "old", kind, [kind])
    words = "false on TPUs ... cpu_checkpointing=True. Leave"
    refused(words, check_host_memory, "tpu", "device", ["device", "pinned_host"])
    assert _now() == {"partition_activations": False, "checkpoint_in_cpu": False, "profile": True}


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_checkpoints": 4},
        {"synchronize": True},
        {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 4},
        {"deepspeed_config": _section(number_checkpoints=4, synchronize_checkpoint_boundary=True)},
    ],
)
def test_what_has_no_effect_says_so_once(arguments: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="^No effect: ") as caught:
        checkpointing.configure(None, **arguments)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_the_warning_names_argument_key_and_substitute() -> None:
    with pytest.warns(
        UserWarning, match=r"synchronize \(activation_checkpointing.synchronize_.*jax.profiler"
    ):
        checkpointing.configure(None, synchronize=True)


def test_host_memory_of_cpus_is_their_own() -> None:
    match = (
        r"^No effect: checkpoint_in_cpu \(activation_checkpointing.cpu_checkpointing\): the "
        r"devices are CPUs.*GPUs"
    )
    with pytest.warns(ConfigWarning, match=match):
        checkpointing.settings_for(_section(cpu_checkpointing=True))
    with pytest.warns(ConfigWarning, match=match):
        checkpointing.configure(None, checkpoint_in_cpu=True)


@pytest.mark.parametrize(
    ("shape", "axes"), [((2, 2), ("stage", "data")), ((2, 1), ("stage", "model"))]
)
def test_activations_are_not_shared_without_an_axis_for_it(
    shape: tuple[int, ...], axes: tuple[str, ...]
) -> None:
    mesh = jax.make_mesh(
        shape, axes, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: shape[0] * shape[1]]
    )
    match = (
        r"^No effect: partition_activations \(activation_.*no axis 'model' .* use "
        r"PipeModelDataParallelTopology"
    )
    with pytest.warns(ConfigWarning, match=match):
        checkpointing.settings_for(_section(partition_activations=True), mesh)


def test_activations_are_shared_over_an_axis_for_it() -> None:
    mesh = jax.make_mesh(
        (1, 2), ("stage", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpointing.settings_for(_section(partition_activations=True), mesh)


def test_set_num_layers_has_no_effect() -> None:
    before = checkpointing.current_settings()
    with pytest.warns(UserWarning, match="num_checkpoints .*no contiguous buffer"):
        checkpointing.set_num_layers(3)
    assert checkpointing.current_settings() == before


def test_grids_and_meshes_are_units() -> None:
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2))
    checkpointing.configure(grid)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    checkpointing.configure(mesh, checkpoint_in_cpu=True)
    assert checkpointing.is_configured()


def test_settings_for_a_configuration_set_nothing() -> None:
    config = _section(partition_activations=True, profile=True)
    assert checkpointing.settings_for(config) == RecomputeSettings(
        partition_activations=True, profile=True
    )
    assert checkpointing.settings_for(None) == RecomputeSettings()
    assert not checkpointing.is_configured()


def test_settings_for_a_configuration_are_those_of_configure_where_it_was_called() -> None:
    checkpointing.configure(None, checkpoint_in_cpu=True)
    assert checkpointing.settings_for(_section(profile=True)) == RecomputeSettings(
        checkpoint_in_cpu=True, configured=True
    )


def test_settings_for_a_configuration_warn() -> None:
    with pytest.warns(UserWarning, match="number_checkpoints"):
        checkpointing.settings_for(_section(number_checkpoints=2))


def test_use_settings_ends_with_its_block() -> None:
    with checkpointing.use_settings(RecomputeSettings(profile=True)):
        assert _now()["profile"]
        checkpointing.configure(None, partition_activations=True)
    assert checkpointing.current_settings() == RecomputeSettings()


def test_threads_have_settings_of_their_own() -> None:
    seen: list[bool] = []
    checkpointing.configure(None)
    thread = threading.Thread(target=lambda: seen.append(checkpointing.is_configured()))
    thread.start()
    thread.join()
    assert seen == [False]


def test_harmless_settings_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpointing.configure(
            None, partition_activations=True, checkpoint_in_cpu=False, profile=True
        )
