"""Seconds of kernels by a roofline model: arithmetic or memory traffic, whichever is longer."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxpipe.distributed.topology import FSDP
from jaxpipe.programs.jaxpr import Kernel

from ._hardware import Hardware


class Time(NamedTuple):
    """Time of some kernels on one device.

    Attributes:
        seconds: Seconds of all kernels, including collectives inside a stage, which are assumed not
            to be overlapped.
        flops: Operations of products and attention.
        whole_flops: The same with the full square of attention.
    """

    seconds: float = 0.0
    flops: float = 0.0
    whole_flops: float = 0.0


def kernel_s(hardware: Hardware, flops: float, attention: float, num_bytes: float) -> float:
    """Seconds of a kernel by the operations of products and attention, and the bytes it moves."""
    arithmetic_s = flops / (hardware.flops_per_s * hardware.gemm_share)
    arithmetic_s += attention / (hardware.flops_per_s * hardware.attention_share)
    return max(arithmetic_s, bytes_s(hardware, num_bytes))


def bytes_s(hardware: Hardware, num_bytes: float) -> float:
    """Return the seconds in which a device reads and writes bytes."""
    return num_bytes / (hardware.bytes_per_s * hardware.traffic_share)


def collective_s(
    hardware: Hardware, kind: str, num_bytes: float, size: int, *, inside_host: bool
) -> float:
    """Seconds of a collective alone; `kind` is HLO's name, `num_bytes` those of the whole array."""
    if size < 2:
        return 0.0
    share = {"collective-permute": 1.0, "all-reduce": 2 * (size - 1) / size}.get(
        kind, (size - 1) / size
    )
    return hardware.wire_s(share * num_bytes, inside_host=inside_host)


def time_of(
    hardware: Hardware, kernels: Iterable[Kernel], axes: Mapping[str, tuple[int, bool]]
) -> Time:
    """Return the time of kernels that run one after another; `axes` is from `axes_inside`."""
    computing_s = moving_s = exposed_s = hidden_s = total_flops = masked_flops = 0.0
    for each in kernels:
        # Products of 32 bits run at half of the peak, as TF32.
        flops = each.flops * (1 if each.is_narrow else 2)
        total_flops += each.times * flops
        masked_flops += each.times * each.masked_flops * (1 if each.is_narrow else 2)
        if each.kind == "product":
            computing_s += each.times * kernel_s(hardware, flops, 0.0, each.num_bytes)
        elif each.kind == "attention":
            computing_s += each.times * kernel_s(hardware, 0.0, flops, each.num_bytes)
        elif each.kind == "other":
            moving_s += each.times * bytes_s(hardware, each.num_bytes)
        else:
            size, inside_host = axes.get(each.axis, (1, True))
            # Samples divided over `fsdp` require sums of gradients, of which each device keeps its
            # share. The products of the previous layer overlap them.
            is_hidden = each.axis == FSDP
            names = {
                "exchange": "all-to-all",
                "shift": "collective-permute",
                "reduce": "all-reduce",
            }
            kind = "all-gather" if is_hidden else names.get(each.kind, "all-gather")
            seconds = each.times * collective_s(
                hardware, kind, each.num_bytes, size, inside_host=inside_host
            )
            hidden_s += seconds * is_hidden
            exposed_s += seconds * (not is_hidden)
    exposed_s += max(0.0, hidden_s - computing_s)
    return Time(computing_s + moving_s + exposed_s, total_flops, total_flops + masked_flops)
