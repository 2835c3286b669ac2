"""Reading hostfiles, and choosing nodes and slots from them."""

import re
from pathlib import Path

from jaxpipe.distributed import whole_number
from jaxpipe.errors import LaunchError, shown

from ._layout import Node, read_name, read_nodes

_LINE = re.compile(r"(\S+)\s+slots=([0-9]+)")
_MAX_SLOTS = 4096
_MOST_LISTED = 20


def read_hostfile(path: Path) -> tuple[Node, ...]:
    """Read DeepSpeed's hostfile, of lines `name slots=N`; each node has slots 0 to N - 1."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"--hostfile must be a text file that can be read, but got {path}: {error}. Give the "
            "path of a file with lines such as 'worker-0 slots=8'."
        ) from error
    nodes: dict[str, Node] = {}
    first_seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        name = read_name(match[1]) if match else None
        slots = whole_number(match[2]) or 0 if match else 0
        if name is None or not 0 < slots <= _MAX_SLOTS:
            raise LaunchError(
                f"{path}, line {number} must be 'name slots=N' with N in [1, {_MAX_SLOTS}], but "
                f"got {shown(text)}. Write for instance 'worker-0 slots=8'."
            )
        if name in nodes:
            raise LaunchError(
                f"{path}, line {number} must name a new node, but got {name!r}, which line "
                f"{first_seen[name]} names. Keep one of the two lines."
            )
        first_seen[name] = number
        nodes[name] = Node(name, tuple(range(slots)))
    if not nodes:
        raise LaunchError(
            f"{path} must name at least one node, but got {len(lines)} lines without any. "
            "Write a line such as 'worker-0 slots=8'."
        )
    return tuple(nodes.values())


def choose_nodes(
    nodes: tuple[Node, ...],
    *,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: int | None = None,
    num_gpus: int | None = None,
) -> tuple[Node, ...]:
    """Choose nodes and slots of a hostfile, in its order, by DeepSpeed's options of these names.

    `include` and `exclude` are `NODE[:SLOTS]` joined by `@`; a node without slots means all of its
    slots. `num_nodes` chooses the first nodes, and `num_gpus` the first slots of each.
    """
    counted = num_nodes is not None or num_gpus is not None
    given = {
        "--include": include is not None,
        "--exclude": exclude is not None,
        "--num_nodes or --num_gpus": counted,
    }
    used = [name for name, is_given in given.items() if is_given]
    if len(used) > 1:
        raise LaunchError(
            f"Nodes must be chosen in one way, but got {' and '.join(used)}. Keep one of them; "
            "slots may be written as --include NODE:0,1."
        )
    if include is not None:
        named = _known(nodes, include, "--include")
        return tuple(Node(node.name, named[node.name]) for node in nodes if node.name in named)
    if exclude is not None:
        named = _known(nodes, exclude, "--exclude")
        remaining = [
            Node(n.name, tuple(slot for slot in n.slots if slot not in named.get(n.name, ())))
            for n in nodes
        ]
        left = tuple(node for node in remaining if node.slots)
        if not left:
            raise LaunchError(
                f"--exclude must leave at least one slot, but got --exclude {shown(exclude)}. "
                f"The hostfile has {_listed(nodes)}; exclude fewer."
            )
        return left
    return _first(nodes, num_nodes, num_gpus)


def _first(
    nodes: tuple[Node, ...], num_nodes: int | None, num_gpus: int | None
) -> tuple[Node, ...]:
    if num_nodes is not None and num_nodes > len(nodes):
        raise LaunchError(
            f"--num_nodes must be at most the {len(nodes)} nodes of the hostfile, but got "
            f"--num_nodes {num_nodes}. It has {_listed(nodes)}."
        )
    taken = nodes[:num_nodes]
    if num_gpus is None:
        return taken
    for node in taken:
        if num_gpus > len(node.slots):
            raise LaunchError(
                "--num_gpus must be at most the slots of every node, but got --num_gpus "
                f"{num_gpus} and {node.name} has slots={len(node.slots)}. Ask for fewer, or leave "
                f"the node out with --exclude {node.name}."
            )
    return tuple(Node(node.name, node.slots[:num_gpus]) for node in taken)


def _known(nodes: tuple[Node, ...], text: str, option: str) -> dict[str, tuple[int, ...]]:
    """The nodes and slots that an option names, in ascending order, after checking them."""
    all_slots = {node.name: node.slots for node in nodes}
    found = {}
    for name, slots in read_nodes(text, option):
        if name not in all_slots:
            raise LaunchError(
                f"{option} must name nodes of the hostfile, but got {shown(name)} in "
                f"{option} {shown(text)}. It has {_listed(nodes)}."
            )
        unknown = [slot for slot in slots or () if slot not in all_slots[name]]
        if unknown:
            raise LaunchError(
                f"{option} must name slots that {name} has, but got slot {unknown[0]} in {option} "
                f"{shown(text)}. It has slots 0 to {len(all_slots[name]) - 1}."
            )
        found[name] = tuple(sorted(slots)) if slots is not None else all_slots[name]
    return found


def _listed(nodes: tuple[Node, ...]) -> str:
    listed = ", ".join(f"{node.name} slots={len(node.slots)}" for node in nodes[:_MOST_LISTED])
    return listed + (f" and {len(nodes) - _MOST_LISTED} more" if nodes[_MOST_LISTED:] else "")
