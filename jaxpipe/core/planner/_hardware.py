"""Accelerators by name.

Peaks, memory and links, and the share of them that programs are assumed to reach.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from jaxpipe.errors import ConfigError, nearest

ASSUMED: dict[str, dict[str, float]] = {
    "optimistic": {"gemm_share": 0.70, "attention_share": 0.50, "traffic_share": 0.85},
    "fair": {"gemm_share": 0.65, "attention_share": 0.46, "traffic_share": 0.78},
    "pessimistic": {"gemm_share": 0.60, "attention_share": 0.42, "traffic_share": 0.70},
}
"""The share of the peaks that products, fused attention and streaming kernels reach, by name.

In this order: tuned kernels in isolation, typical measurements in training, and their lower end.
"""


@dataclass(frozen=True)
class Hardware:
    """An accelerator and its links.

    The shares are assumptions, not measurements: the share of the peaks that large matrix products,
    fused attention and streaming kernels reach on these kinds of GPU.

    Attributes:
        name: The name of the accelerator.
        flops_per_s: Peak of dense bfloat16 products, in operations per second.
        memory_bytes: Bytes of memory.
        bytes_per_s: Memory bandwidth, in bytes per second.
        wire_bytes_per_s: Bandwidth between devices of a host, in bytes per second and direction.
        network_bytes_per_s: Bandwidth between hosts, in bytes per second and direction, for each
            device.
        devices_per_host: Devices per host.
        gemm_share: Share of `flops_per_s` that matrix products reach.
        attention_share: Share of `flops_per_s` that attention reaches.
        traffic_share: Share of `bytes_per_s` that kernels reach.
        wire_share: Share of `wire_bytes_per_s` that collectives reach.
        usable_share: Share of `memory_bytes` that programs can use. Drivers and fragmentation take
            the rest.
        latency_s: Seconds of a collective in addition to the transfer of its bytes.
        platform: JAX's name for the platform of these devices.
        communicator_bytes: Bytes of each communicator, in addition to the program's memory.
        branch_s: Seconds of a conditional. On GPUs it is a node of a CUDA graph, and the host does
            not wait for it unless it contains collectives.

    Raises:
        ConfigError: A number is not positive, or a share is above 1.
    """

    name: str
    flops_per_s: float
    memory_bytes: float
    bytes_per_s: float
    wire_bytes_per_s: float
    network_bytes_per_s: float = 50e9
    devices_per_host: int = 8
    gemm_share: float = ASSUMED["optimistic"]["gemm_share"]
    attention_share: float = ASSUMED["optimistic"]["attention_share"]
    traffic_share: float = ASSUMED["optimistic"]["traffic_share"]
    wire_share: float = 0.8
    usable_share: float = 0.92
    latency_s: float = 15e-6
    branch_s: float = 8e-6
    communicator_bytes: float = 0.8e9
    platform: str = "gpu"

    def __post_init__(self) -> None:
        """Check the numbers."""
        if isinstance(self.devices_per_host, float) and self.devices_per_host.is_integer():
            object.__setattr__(self, "devices_per_host", int(self.devices_per_host))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "platform"):
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_time = field.name.endswith("_s") and not field.name.endswith("_per_s")
            lowest = 0.0 if is_time or field.name == "communicator_bytes" else 1e-300
            if not is_number or not lowest <= value < float("inf"):
                rule = "at least 0" if lowest == 0.0 else "a positive number"
                raise ConfigError(
                    f"{field.name} of hardware {self.name!r} must be {rule}, but got "
                    f"{field.name}={value!r}. Pass bytes, operations and seconds, such as "
                    "Hardware('mine', 989e12, 141e9, 4.8e12, 450e9)."
                )
            if field.name == "devices_per_host" and value != int(value):
                raise ConfigError(
                    f"devices_per_host of hardware {self.name!r} must be a whole number, but got "
                    f"devices_per_host={value!r}. Round it."
                )
            if field.name.endswith("_share") and value > 1:
                raise ConfigError(
                    f"{field.name} of hardware {self.name!r} must be a share of the peak, at most "
                    f"1, but got {field.name}={value!r}. Divide percentages by 100."
                )

    @property
    def ideal(self) -> "Hardware":
        """The same hardware, if it reached its peaks."""
        return replace(
            self,
            gemm_share=1.0,
            attention_share=1.0,
            traffic_share=1.0,
            wire_share=1.0,
            latency_s=0.0,
            branch_s=0.0,
        )

    def assuming(self, shares: str | Mapping[str, float]) -> "Hardware":
        """Return the same hardware with other assumptions.

        Args:
            shares: A name in `ASSUMED`, or values for some fields.

        Returns:
            The hardware with these assumptions.

        Raises:
            ConfigError: A name is unknown or a value is invalid.
        """
        if isinstance(shares, str):
            if shares not in ASSUMED:
                raise ConfigError(
                    f"assume must be one of {', '.join(map(repr, ASSUMED))} or a mapping of fields "
                    f"of Hardware, but got assume={shares!r}. Write for instance 'fair'."
                )
            shares = ASSUMED[shares]
        known = [field.name for field in fields(self) if field.name != "name"]
        wrong = next((name for name in shares if name not in known), None)
        if wrong is not None:
            raise ConfigError(
                f"assume must name fields of Hardware, which are {', '.join(known)}, but got "
                f"{wrong!r}. Correct or remove it."
            )
        return replace(self, **shares)

    def usable_bytes(self, num_communicators: int = 0) -> float:
        """Return the bytes of memory that programs can use besides some communicators."""
        return self.usable_share * self.memory_bytes - num_communicators * self.communicator_bytes

    def host_of(self, device: int) -> int:
        """Return the number of a device's host."""
        return device // self.devices_per_host

    def wire_s(self, num_bytes: float, *, inside_host: bool) -> float:
        """Return the seconds to send bytes from one device to another."""
        speed = self.wire_bytes_per_s * self.wire_share if inside_host else self.network_bytes_per_s
        return self.latency_s + num_bytes / speed


def _tpu(
    name: str, flops_per_s: float, memory: float, bytes_per_s: float, link: float, pod: int
) -> Hardware:
    """Return a TPU chip. Its "host" is all the chips that its links reach: a pod."""
    # A conditional is a jump on the chip, and the program's memory includes the collectives'
    # buffers.
    own = {"latency_s": 1e-6, "branch_s": 1e-6, "communicator_bytes": 0.0, "wire_share": 0.9}
    peaks = flops_per_s, memory, bytes_per_s, link, 6.25e9
    return Hardware(name, *peaks, devices_per_host=pod, platform="tpu", **own)


_TPU_KINDS = {"tpuv5lite": "v5e", "tpuv5p": "v5p", "tpuv5": "v5p", "tpuv6lite": "v6e"}
"""The device kinds of TPUs, without spaces."""

HARDWARE: dict[str, Hardware] = {
    "a100": Hardware("a100", 312e12, 80e9, 2.039e12, 300e9, network_bytes_per_s=25e9),
    "a100-80gb": Hardware("a100-80gb", 312e12, 80e9, 2.039e12, 300e9, network_bytes_per_s=25e9),
    "a100-40gb": Hardware("a100-40gb", 312e12, 40e9, 1.555e12, 300e9, network_bytes_per_s=25e9),
    "h100": Hardware("h100", 989e12, 80e9, 3.35e12, 450e9),
    "h200": Hardware("h200", 989e12, 141e9, 4.8e12, 450e9),
    "gh200": Hardware("gh200", 989e12, 96e9, 4.0e12, 450e9, devices_per_host=1),
    "l40s": Hardware("l40s", 362e12, 48e9, 0.864e12, 32e9, network_bytes_per_s=25e9),
    "b200": Hardware("b200", 2250e12, 180e9, 7.7e12, 900e9),
    "v5e": _tpu("v5e", 197e12, 16e9, 0.819e12, 45e9, 256),
    "v5p": _tpu("v5p", 459e12, 95e9, 2.765e12, 90e9, 8960),
    "v6e": _tpu("v6e", 918e12, 32e9, 1.64e12, 90e9, 256),
    "mi300x": Hardware("mi300x", 1307e12, 192e9, 5.3e12, 448e9),
}
"""Known accelerators, from the vendors' data sheets.

The GPUs are SXM or OAM modules, L40S is a PCIe card, and the TPUs are chips. Add your own with
`HARDWARE["name"] = ...`.
"""


def named_hardware(kind: str) -> Hardware | None:
    """Return the known accelerator with a device kind, or None if it is unknown."""
    kind = kind.lower().replace(" ", "")
    if kind in _TPU_KINDS:
        return HARDWARE[_TPU_KINDS[kind]]
    return next(
        (
            HARDWARE[name]
            for name in sorted(HARDWARE, key=len, reverse=True)
            if all(part in kind for part in name.lower().split("-"))
        ),
        None,
    )


def read_hardware(text: str | tuple[Hardware, int]) -> tuple[Hardware, int]:
    """Return the accelerator and the number of devices of a string such as `"h200:64"`."""
    if isinstance(text, tuple):
        hardware, count = (*text, None, None)[:2]
        if (
            len(text) != 2
            or not isinstance(hardware, Hardware)
            or type(count) is not int
            or count < 1
        ):
            raise ConfigError(
                "hardware must be a pair of a Hardware and a positive number of devices, but got "
                f"hardware={text!r}. Write for instance (HARDWARE['h200'], 64)."
            )
        return hardware, count
    found = re.fullmatch(r"\s*([\w.-]+)\s*:\s*(\d+)\s*", text) if isinstance(text, str) else None
    if found is None or int(found[2]) < 1:
        raise ConfigError(
            "hardware must be a name and a positive number of devices, 'NAME:NUMBER', but got "
            f"hardware={text!r}. Write for instance 'h200:64'."
        )
    name = found[1].lower()
    if name not in HARDWARE:
        near = nearest(name, HARDWARE, cutoff=0.4)
        hint = f"Did you mean {near!r}? If not" if near else "Use one of these, or"
        memory = {key: f"{each.memory_bytes / 1e9:.0f} GB" for key, each in HARDWARE.items()}
        known = ", ".join(f"{key} ({size})" for key, size in memory.items())
        raise ConfigError(
            f"hardware must be one of {known}, but got {found[1]!r}. {hint}, plan for another "
            f"memory or GPU with jaxpipe.forecast.HARDWARE[{name!r}] = Hardware(...) in the job's "
            "file."
        )
    return HARDWARE[name], int(found[2])
