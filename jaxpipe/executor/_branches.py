"""Branches of compiled programs, where devices must not wait for each other.

Stages take different branches of a conditional. What XLA's partitioner puts into one, so that the devices along an
automatic axis work together, is mostly done in groups of those devices, all of which take the same branch. Not so a
`collective-permute`, with which it moves slices to the next device: on simulated CPU devices (JAX 0.10) it waits for
all devices of the program, and so for ever.
"""

import re
from collections.abc import Mapping

from jax.sharding import Mesh

from jaxpipe.errors import LayerError
from jaxpipe.topology import automatic_axes

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_SHIFT = re.compile(r" collective-permute(?:-start)?\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


def waits_in_branches(mesh: Mesh) -> bool:
    """True if a slice that is moved inside a branch may wait for ever: on CPU, with automatic axes."""
    return mesh.devices.flat[0].platform == "cpu" and bool(automatic_axes(mesh))


def check_branches(text: str) -> None:
    """Refuse a compiled program that would wait for ever.

    Args:
        text: The program, as `jax.stages.Compiled.as_text` gives it.

    Raises:
        LayerError: Slices are moved from device to device inside a branch.
    """
    computations = _computations(text)
    # From every branch on, all that it calls: a loop inside a branch is in the branch, too.
    inside: set[str] = set()
    left = [name for lines in computations.values() for line in lines for name in _branches(line)]
    while left:
        name = left.pop()
        if name not in inside and name in computations:
            inside.add(name)
            left += [called for line in computations[name] for called in (*_CALLED.findall(line), *_branches(line))]
    shifts = [line for name in sorted(inside) for line in computations[name] if _SHIFT.search(line)]
    if shifts:
        found = _OP_NAME.search(shifts[0])
        where = found.group(1).rpartition("branch_")[2].partition("/")[2] if found else "an operation without a name"
        raise LayerError(
            "layers that only some stages run must not cut what is sharded at other places than the mesh does, but got "
            f"{len(shifts)} slices that are moved from device to device, the first for {where}. On simulated CPU "
            "devices that would wait for ever. Constrain what is cut there with "
            "jax.lax.with_sharding_constraint so that it is whole along the dim that is cut, or split weights that "
            "hold several parts, such as query, key and value, into one each."
        )


def _computations(text: str) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            lines = found[head.group(1)] = []
        else:
            lines.append(line)
    return found


def _branches(line: str) -> list[str]:
    if " conditional(" not in line:
        return []
    # Two branches are printed as `true_computation` and `false_computation`, others as one list.
    listed = _BRANCHES.search(line)
    return re.findall(r"[\w.\-]+", listed.group(1)) if listed else _CALLED.findall(line)
