"""DeepSpeed's functions that configure how recompute stores the inputs that it keeps."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpipe._util.numbers import as_flag, as_integer
from jaxpipe._util.warn import warn
from jaxpipe.config import ConfigWarning, TrainConfig, load_config
from jaxpipe.errors import ConfigError

from ._settings import RecomputeSettings, current_settings, set_settings

ConfigLike = TrainConfig | Mapping[str, Any] | str | PathLike[str] | None


@dataclass(frozen=True)
class _Argument:
    """An argument of `configure`, with its `key` in the section `activation_checkpointing`.

    `no_effect` is the reason why it has no effect, always or in the cases that `_resolve` finds;
    None if it always has one.
    """

    key: str
    no_effect: str | None = None


_ARGUMENTS = {
    "partition_activations": _Argument(
        "partition_activations",
        "the mesh has no axis 'model' of more than one device to share them; use "
        "PipeModelDataParallelTopology",
    ),
    "contiguous_checkpointing": _Argument(
        "contiguous_memory_optimization",
        "XLA lays out all of a program's memory before it runs, so nothing fragments",
    ),
    "num_checkpoints": _Argument(
        "number_checkpoints", "there is no buffer whose size it would set"
    ),
    "checkpoint_in_cpu": _Argument(
        "cpu_checkpointing",
        "the devices are CPUs, whose own memory is the host's; leave it to GPUs",
    ),
    "synchronize": _Argument(
        "synchronize_checkpoint_boundary",
        "a compiled program orders its own operations; to time one, use jax.profiler, or "
        "jax.block_until_ready around the whole step",
    ),
    "profile": _Argument("profile"),
}


def configure(
    mpu_: Any = None,
    deepspeed_config: ConfigLike = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set how `checkpoint` keeps the inputs of the functions it recomputes.

    The section `activation_checkpointing` of the configuration overrides the defaults, and
    arguments that are not None override the section. The settings apply in this thread to every
    program traced from now on. Programs that are already compiled keep the settings they were
    traced with.

    Args:
        mpu_: A mesh, or an object with DeepSpeed's methods such as a `PipelineParallelGrid`, or
            None. It only determines which devices must have host memory. Activations are always
            shared over the automatic axis `model` of the mesh that the function is traced on.
        deepspeed_config: A configuration, a dictionary, or the path of a JSON file.
        partition_activations: Keep on each device of the `model` axis only its share of the inputs,
            and gather them again in the backward pass. The inputs get a sharding constraint along
            the largest dim that the axis divides. This has no effect if there is no such axis, if
            its length is 1, or on inputs without such a dim; it warns if a mesh shows this. JSON
            key `partition_activations`.
        contiguous_checkpointing: No effect, with a warning: XLA lays out memory by itself. Needs
            `partition_activations` and `num_checkpoints`, as in DeepSpeed. JSON key
            `contiguous_memory_optimization`.
        num_checkpoints: No effect, with a warning. JSON key `number_checkpoints`.
        checkpoint_in_cpu: Keep the inputs in host memory. It works with and without
            `partition_activations`, which DeepSpeed's manual requires. No effect on CPU devices,
            with a warning. JSON key `cpu_checkpointing`.
        synchronize: No effect, with a warning: a compiled program orders its operations by itself.
            JSON key `synchronize_checkpoint_boundary`.
        profile: Name each recomputed function in profiles, as `checkpoint/<function>`, with its
            second run under `rematted_computation`. DeepSpeed logs times. If a step is one program,
            times exist only in a profile. JSON key `profile`.

    Raises:
        ConfigError: An argument is of the wrong type, the configuration is not valid,
            `contiguous_checkpointing` is set without the arguments it needs, or `checkpoint_in_cpu`
            is set and a device has no separate host memory.
    """
    explicit = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    _check_types(explicit)
    _check_unit(mpu_)
    set_settings(dataclasses.replace(_resolve(mpu_, deepspeed_config, explicit), configured=True))


def settings_for(config: ConfigLike, mesh: Mesh | None = None) -> RecomputeSettings:
    """The settings of a configuration, with which a pipeline traces its programs.

    Args:
        config: The configuration. Its section `activation_checkpointing` is used unless `configure`
            was called, because that call is more explicit and may have used the same configuration.
        mesh: The mesh whose devices must have host memory if the settings need it.

    Returns:
        The settings. They are not stored.

    Raises:
        ConfigError: As in `configure`.
    """
    if is_configured():
        return current_settings()
    return _resolve(mesh, config, {})


def is_configured() -> bool:
    """True once `configure` has been called in this thread."""
    return current_settings().configured


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Turn the partitioning of kept activations on or off, without changing other settings.

    Args:
        partition_activation: As in `configure(partition_activations=...)`.

    Raises:
        ConfigError: It is not a boolean.
    """
    _check_types({"partition_activations": partition_activation}, optional=False)
    set_settings(
        dataclasses.replace(current_settings(), partition_activations=partition_activation)
    )


def check_host_memory(platform: str, default: str, kinds: Collection[str]) -> None:
    """Refuse TPUs, and devices without `pinned_host` memory apart from the kind `default`."""
    if platform == "tpu":
        # Seen with libtpu 0.0.42: an internal check of gather layouts fails. It cannot be caught.
        raise ConfigError(
            "activation_checkpointing.cpu_checkpointing must be false on TPUs, where XLA's "
            "compiler ends the process over residuals in host memory, but got "
            "cpu_checkpointing=True. Leave cpu_checkpointing (checkpoint_in_cpu) out; "
            "partition_activations or fewer layers between recomputed groups also save memory."
        )
    if "pinned_host" in kinds and default != "pinned_host":
        return
    raise ConfigError(
        "activation_checkpointing.cpu_checkpointing must run on a backend with host memory "
        f"separate from the device's, but got backend={platform!r} with memories {sorted(kinds)} "
        f"(default {default!r}). Leave cpu_checkpointing (checkpoint_in_cpu) out; "
        "partition_activations or fewer layers between recomputed groups also save memory."
    )


def _resolve(unit: Any, config: ConfigLike, explicit: Mapping[str, Any]) -> RecomputeSettings:
    """The settings of a configuration and of arguments; warns if some have no effect."""
    section = load_config(config).activation_checkpointing
    values = {name: getattr(section, argument.key) for name, argument in _ARGUMENTS.items()}
    values |= {name: value for name, value in explicit.items() if value is not None}
    if values["contiguous_checkpointing"] and not values["partition_activations"]:
        raise ConfigError(
            "contiguous_checkpointing must be used with partition_activations=True, but got "
            "partition_activations=False. Leave contiguous_checkpointing (activation_checkpointing."
            "contiguous_memory_optimization) out: XLA lays out memory by itself."
        )
    if values["contiguous_checkpointing"] and values["num_checkpoints"] is None:
        raise ConfigError(
            "contiguous_checkpointing must be used with num_checkpoints, the number of recomputed "
            "groups, but got num_checkpoints=None. Give num_checkpoints "
            "(activation_checkpointing.number_checkpoints), or leave both out: XLA lays out memory "
            "by itself."
        )
    device = unit.devices.flat[0] if isinstance(unit, Mesh) else jax.local_devices()[0]
    if values["checkpoint_in_cpu"]:
        # For a device that is not present, only the platform is known.
        is_absent = getattr(device, "is_absent", False)
        memories = () if is_absent else device.addressable_memories()
        kinds = [memory.kind for memory in memories] or ["pinned_host"]
        default = "device" if is_absent else device.default_memory().kind
        check_host_memory(device.platform, default, kinds)
    has_effect = {
        "partition_activations": not isinstance(unit, Mesh) or unit.shape.get("model", 1) > 1,
        "checkpoint_in_cpu": device.platform != "cpu",
    }
    asked = {
        name: argument
        for name, argument in _ARGUMENTS.items()
        if values[name] and argument.no_effect
    }
    reasons = [
        f"{name} (activation_checkpointing.{argument.key}): {argument.no_effect}"
        for name, argument in asked.items()
        if not has_effect.get(name, False)
    ]
    if reasons:
        # The warning points to the caller of `configure`, or of `settings_for`.
        warn(f"No effect: {'; '.join(reasons)}.", ConfigWarning)
    return RecomputeSettings(
        partition_activations=values["partition_activations"],
        checkpoint_in_cpu=values["checkpoint_in_cpu"],
        profile=values["profile"],
    )


def _check_types(arguments: Mapping[str, Any], *, optional: bool = True) -> None:
    for name, value in arguments.items():
        if value is None and optional:
            continue
        if name == "num_checkpoints":
            if as_integer(value, 1) is None:
                raise ConfigError(
                    f"{name} must be an integer >= 1, but got {name}={value!r}. Give the number of "
                    "recomputed groups, or leave it out."
                )
        elif as_flag(value) is None:
            raise ConfigError(
                f"{name} must be True or False, but got {name}={value!r}. Pass a boolean."
            )


def _check_unit(unit: Any) -> None:
    methods = ("get_model_parallel_world_size", "get_data_parallel_world_size")
    if unit is None or isinstance(unit, Mesh) or all(hasattr(unit, name) for name in methods):
        return
    raise ConfigError(
        "mpu_ must be None, a mesh, or an object with DeepSpeed's methods such as a "
        f"PipelineParallelGrid, but got a {type(unit).__name__}. Pass a configuration as "
        "deepspeed_config=."
    )
