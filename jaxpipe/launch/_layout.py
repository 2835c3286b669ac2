"""Assignment of processes to nodes and devices."""

import re
from dataclasses import dataclass

from jaxpipe.distributed import bracketed, is_ipv6, whole_number
from jaxpipe.errors import LaunchError, shown

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def read_name(text: str) -> str | None:
    """The name or address of a node, without the brackets of IPv6, or None if it is neither."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return inner if is_ipv6(inner) or _NAME.fullmatch(text) else None


@dataclass(frozen=True)
class Node:
    """One machine: its name, and the local numbers of the devices that the job uses."""

    name: str
    slots: tuple[int, ...]

    def __str__(self) -> str:
        return f"{bracketed(self.name)}:{','.join(map(str, self.slots))}"


@dataclass(frozen=True)
class Layout:
    """All nodes of a job, or some of them, and the number of processes on each.

    Processes are numbered from `first_process`, in the order of the nodes. The devices of a node
    are divided over its processes in equal contiguous blocks. With `processes_per_node=None` each
    slot has its own process. `total` is the number of processes of the job, None if all are here.
    """

    nodes: tuple[Node, ...]
    processes_per_node: int | None = None
    first_process: int = 0
    total: int | None = None

    def __post_init__(self) -> None:
        per_node = self.processes_per_node
        for node in self.nodes:
            if per_node is not None and len(node.slots) % per_node:
                raise LaunchError(
                    f"--processes-per-node must divide the slots of every node, but got {per_node} "
                    f"and {node.name} has slots={len(node.slots)}. Use "
                    f"{_nearest_divisor(len(node.slots), per_node)}, or other slots."
                )

    @property
    def num_processes(self) -> int:
        """The number of processes on all nodes of the job together."""
        return sum(map(self._on, self.nodes)) if self.total is None else self.total

    def first_on(self, rank: int) -> int:
        """The index of the first process of a node."""
        return self.first_process + sum(map(self._on, self.nodes[:rank]))

    def devices(self, rank: int) -> dict[int, tuple[int, ...]]:
        """The processes of a node by their indices in the job, with their devices."""
        slots = self.nodes[rank].slots
        count = self._on(self.nodes[rank])
        first = self.first_on(rank)
        each = len(slots) // count
        return {first + i: slots[i * each : (i + 1) * each] for i in range(count)}

    def rank_of(self, text: str, source: str) -> int:
        """The index of a node from its index or name. Errors name `source` as the origin."""
        names = [node.name for node in self.nodes]
        if text in names:
            return names.index(text)
        rank = whole_number(text)
        if rank is not None and rank < len(names):
            return rank
        raise LaunchError(
            f"{source} must be a number in [0, {len(names)}) or the name of a node, but got "
            f"{shown(text)}. The nodes are {', '.join(names)}."
        )

    def __str__(self) -> str:
        return "@".join(map(str, self.nodes))

    def _on(self, node: Node) -> int:
        return len(node.slots) if self.processes_per_node is None else self.processes_per_node


def read_nodes(text: str, option: str) -> list[tuple[str, tuple[int, ...] | None]]:
    """Split `NAME:SLOT,SLOT@NAME` into names and slots, with None for a node without slots."""
    found: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        name, slots = _name_and_slots(part.strip())
        if name is None or None in slots:
            raise _wrong(option, text, f"{shown(part)} is neither a name nor a name and slots")
        taken = tuple(slot for slot in slots if slot is not None)
        if len(set(taken)) != len(taken):
            twice = max(taken, key=taken.count)
            raise _wrong(option, text, f"{shown(part)} names slot {twice} a second time")
        if name in found:
            raise _wrong(option, text, f"{shown(part)} names {name} a second time")
        found[name] = taken or None
    return list(found.items())


def _name_and_slots(part: str) -> tuple[str | None, list[int | None]]:
    """A node's name and the slots after it, with None for anything invalid."""
    name = read_name(part)
    if name is not None:
        return name, []
    before, _, listed = part.rpartition(":")
    return read_name(before), [whole_number(slot) for slot in listed.split(",")]


def read_slots(text: str, option: str) -> tuple[Node, ...]:
    """Read nodes that all have slots, as for `read_nodes`. This is also the text of a layout."""
    nodes = read_nodes(text, option)
    for name, slots in nodes:
        if slots is None:
            raise _wrong(option, text, f"{name!r} comes without slots")
    return tuple(Node(name, slots or ()) for name, slots in nodes)


def _wrong(option: str, text: str, why: str) -> LaunchError:
    return LaunchError(
        f"{option} must be NODE or NODE:SLOT,SLOT, joined by @, but got {option} {shown(text)}, in "
        f"which {why}. Write for instance worker-0@worker-1:0,2."
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [i for i in range(1, number + 1) if number % i == 0]
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))
