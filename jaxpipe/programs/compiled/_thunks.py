"""What the host launches in a loop of a compiled step, as XLA's own list of thunks has it.

A thunk is what the host does for one or several kernels: a launch, the launch of a CUDA graph that
holds many, a conditional, a loop. XLA writes the list beside its other dumps
(`--xla_dump_to`, `*.thunk_sequence_after_thunk_passes.txt`); HLO does not show the graphs.
"""

import re
from pathlib import Path
from typing import NamedTuple

from ._hlo import Instruction, Module

_THUNK = re.compile(r"^( *)(?:(\d+): (k\w+) |(condition|body|branch_\d+):$)", re.MULTILINE)
_METADATA = re.compile(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)')
DUMP_OPTION = "xla_dump_to"
"""Option of one compilation: the folder that XLA writes to."""


class Thunk(NamedTuple):
    """One entry of the list: XLA's name of its kind, and the name of its instruction."""

    kind: str
    name: str
    in_graph: bool


def read_thunks(folder: Path, loop: Instruction | None, step: str = "train_step") -> list[Thunk]:
    """The thunks of a round of a loop, from what XLA dumped into a folder."""
    # Without graphs there is no pass after which XLA would write the list anew.
    listed = next(folder.glob(f"*{step}*.thunk_sequence_after_thunk_passes.txt"), None)
    listed = listed or next(folder.glob(f"*{step}*.thunk_sequence.txt"), None)
    if listed is None:
        raise ValueError(f"XLA must dump the thunks of {step}, but left none in {folder}.")
    (metadata,) = folder.glob(f"*{step}*.thunk_metadata.txt")
    names = {number: name for name, number in _METADATA.findall(metadata.read_text())}
    return [] if loop is None else parse_thunks(listed.read_text(), names, loop.name)


def parse_thunks(text: str, names: dict[str, str], loop: str) -> list[Thunk]:
    """The thunks of a round of the loop of that name; `names` are those of numbered thunks."""
    found = list[Thunk]()
    around = graph = None
    is_body = False
    for spaces, number, kind, label in _THUNK.findall(text):
        depth = len(spaces)
        if around is None:
            # A graph has a number that another thunk has, too.
            if kind == "kWhile" and names.get(number) == loop:
                around = depth
            continue
        if kind and depth <= around:
            break
        # The labels of a loop's parts are at most two columns further right than the loop.
        if label and depth <= around + 2:
            is_body = label == "body"
        if graph is not None and depth <= graph:
            graph = None
        if kind and is_body:
            found.append(Thunk(kind, names.get(number, ""), graph is not None))
            if kind == "kCommandBuffer" and graph is None:
                graph = depth
    return found


def host_waits(thunks: list[Thunk], module: Module) -> int:
    """How often the host waits for the device in a round of these thunks."""
    # Once for the predicate of a conditional, and for each look at the condition of a loop whose
    # number of rounds is not known when it is compiled. In a graph both are nodes that the device
    # runs, and nobody waits.
    known = {
        line.name
        for computation in module.computations
        for line in module.lines(computation)
        if line.op == "while" and line.trip_count
    }
    return sum(
        thunk.kind == "kConditional" or (thunk.kind == "kWhile" and thunk.name not in known)
        for thunk in thunks
        if not thunk.in_graph
    )
