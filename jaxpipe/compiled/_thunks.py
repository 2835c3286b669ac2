"""What a compiled step launches, as XLA's own list of thunks has it.

A thunk is what the host does for one or several kernels: a launch, the launch of a CUDA graph that
holds many, a conditional, a loop. XLA writes the list beside its other dumps
(`--xla_dump_to`, `*.thunk_sequence_after_thunk_passes.txt`). Three kinds make the host wait for the
device: a conditional outside of a graph, once, for its predicate; a loop outside of a graph whose
number of rounds is not known when it is compiled, once for each look at its condition. A
conditional inside a graph is a node of it, and nobody waits.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ._hlo import Module

_THUNK = re.compile(r"^( *)(\d+): (k\w+) ")
_LABEL = re.compile(r"^( *)(condition|body|branch_\d+):$")
_METADATA = re.compile(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)')
_COLLECTIVES = {
    "kAllGather",
    "kAllReduce",
    "kAllToAll",
    "kCollectiveBroadcast",
    "kCollectivePermute",
    "kReduceScatter",
}
_NOT_KERNELS = _COLLECTIVES | {
    "kAsyncStart",
    "kAsyncDone",
    "kCommandBuffer",
    "kConditional",
    "kSequential",
    "kWhile",
    "kPartitionId",
    "kReplicaId",
}
DUMP_OPTION = "xla_dump_to"
"""Option of one compilation: the folder that XLA writes to."""


@dataclass
class Thunk:
    """One entry of the list, with what is inside it.

    Attributes:
        kind: XLA's name of its kind.
        number: Its number, by which its name is known; graphs have none of their own.
        part: Where in the parent it is: `condition`, `body` or `branch_<n>`.
        inside: Thunks in it.
    """

    kind: str
    number: int
    part: str = ""
    inside: list["Thunk"] = field(default_factory=list)

    def all(self) -> Iterator["Thunk"]:
        """It, and all that are inside it."""
        yield self
        for thunk in self.inside:
            yield from thunk.all()


@dataclass(frozen=True)
class Launches:
    """What the host does for one round of a loop.

    Attributes:
        graphs: CUDA graphs that it launches.
        in_graphs: Kernels in them.
        alone: Kernels that it launches one by one, without collectives.
        collectives: Collectives.
        conditionals: Conditionals outside of graphs, for each of which it waits once.
        loops: Loops of unknown length outside of graphs, for each of which it waits once, and once
            more for each round.
    """

    graphs: int
    in_graphs: int
    alone: int
    collectives: int
    conditionals: int
    loops: int


def read_thunks(folder: Path, step: str = "train_step") -> tuple[list[Thunk], dict[int, str]]:
    """The thunks of a step that XLA dumped into a folder, and the names of their instructions."""
    # Without graphs there is no pass after which XLA would write the list anew.
    listed = next(folder.glob(f"*{step}*.thunk_sequence_after_thunk_passes.txt"), None)
    listed = listed or next(folder.glob(f"*{step}*.thunk_sequence.txt"), None)
    if listed is None:
        raise ValueError(f"XLA must dump the thunks of {step}, but left none in {folder}.")
    (metadata,) = folder.glob(f"*{step}*.thunk_metadata.txt")
    names = {int(number): name for name, number in _METADATA.findall(metadata.read_text())}
    return parse_thunks(listed.read_text()), names


def known_rounds(names: Mapping[int, str], module: Module) -> dict[int, int]:
    """Rounds of the loops whose number is known, by the numbers of their thunks."""
    counts = {line.name: line.trip_count for line in module.loops() if line.trip_count}
    return {number: counts[name] for number, name in names.items() if name in counts}


def parse_thunks(text: str) -> list[Thunk]:
    """Read the list; what stands further right is inside what stands above it."""
    root = Thunk("", -1)
    open_: list[tuple[int, Thunk]] = [(-1, root)]
    parts: dict[int, str] = {}
    for line in text.splitlines():
        label = _LABEL.match(line)
        found = _THUNK.match(line)
        if label:
            while open_[-1][0] > len(label[1]):
                open_.pop()
            parts[id(open_[-1][1])] = label[2]
        elif found:
            while open_[-1][0] >= len(found[1]):
                open_.pop()
            parent = open_[-1][1]
            thunk = Thunk(found[3], int(found[2]), parts.get(id(parent), ""))
            parent.inside.append(thunk)
            open_.append((len(found[1]), thunk))
    return root.inside


def steady_launches(thunks: list[Thunk], rounds: Mapping[int, int]) -> Launches:
    """What the host does for a tick of the steady run: a round of the loop that does most in all.

    `rounds` are those of loops, by their numbers, that are known when they are compiled.
    """
    loops = [thunk for thunk in thunks if thunk.kind == "kWhile"]
    steady = max(loops, key=lambda loop: rounds.get(loop.number, 1) * sum(1 for _ in loop.all()))
    body = [thunk for thunk in steady.inside if thunk.part == "body"]
    outside = list(_outside_graphs(body))
    graphs = [thunk for thunk in outside if thunk.kind == "kCommandBuffer"]
    return Launches(
        graphs=len(graphs),
        in_graphs=sum(_is_kernel(thunk) for graph in graphs for thunk in graph.all()),
        alone=sum(map(_is_kernel, outside)),
        collectives=sum(thunk.kind in _COLLECTIVES for thunk in outside),
        conditionals=sum(thunk.kind == "kConditional" for thunk in outside),
        loops=sum(thunk.kind == "kWhile" and thunk.number not in rounds for thunk in outside),
    )


def _outside_graphs(thunks: list[Thunk]) -> Iterator[Thunk]:
    """All thunks but those in graphs; the graphs themselves too."""
    for thunk in thunks:
        yield thunk
        if thunk.kind != "kCommandBuffer":
            yield from _outside_graphs(thunk.inside)


def _is_kernel(thunk: Thunk) -> bool:
    return thunk.kind not in _NOT_KERNELS
