"""Operations of a step that JAX's profiler has recorded, by phase and layer."""

import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from jaxpipe.distributed import log

T = TypeVar("T")

PHASES = (
    "forward",
    "backward",
    "weight_gradient",
    "loss",
    "send",
    "receive",
    "gather",
    "reduce",
    "update",
)
"""Scopes that the executor's operations are in, in the order of a step; the outermost counts."""

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = ")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CONTAINER = re.compile(r" (?:while|conditional|call)\(")
"""Instructions whose events only hold those of others."""
_TICKS = re.compile(r"ticks_(\d+)_(\d+)")
_Scope = tuple[str, int, tuple[int, int], frozenset[str]]
_WORDS = re.compile(r"[/(),]+")


class Operation(NamedTuple):
    """An operation that a device has run.

    Attributes:
        device: The device's number in this process, `local_hardware_id`.
        name: Its name in the compiled program.
        phase: The scope of the executor that it is in; empty for what is in none.
        depth: Loops that it is in, that over ticks included.
        ticks: First tick of the run that it belongs to, and the tick behind the last; equal where
            it is in none.
        words: Names of scopes that it is in, those of layers among them.
        start_s: Seconds from the first operation.
        end_s: Seconds likewise.
    """

    device: int
    name: str
    phase: str
    depth: int
    ticks: tuple[int, int]
    words: frozenset[str]
    start_s: float
    end_s: float


def record(run: Callable[[], T], text: str) -> tuple[T, list[Operation]]:
    """Record what devices of this process do in a call.

    Args:
        run: Runs a compiled program, and may return before it has ended.
        text: The program, as `jax.stages.Compiled.as_text` gives it.

    Returns:
        What the call gave, and the program's operations, by the time they began.

    Raises:
        RuntimeError: A profile is being recorded already; the call has not been made.
    """
    scopes = dict(_scopes(text))
    module = text.split(None, 2)[1].rstrip(",")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = (
        0  # every call of Python would be recorded too, which takes longer than a step
    )
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            result = jax.block_until_ready(run())
        finally:
            found = _stopped(folder, module, scopes)
    begin = min((each.start_s for each in found), default=0.0)
    moved = [
        each._replace(start_s=each.start_s - begin, end_s=each.end_s - begin) for each in found
    ]
    return result, sorted(moved, key=lambda each: each.start_s)


def _stopped(folder: str, module: str, scopes: Mapping[str, _Scope]) -> list[Operation]:
    """End the recording; what is wrong with it must not cost the state that the call has given."""
    try:
        jax.profiler.stop_trace()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        with warnings.catch_warnings():
            # Python 3.12 and newer warn of jaxlib 0.10's types; where warnings are errors that
            # aborts the process.
            warnings.filterwarnings(
                "ignore", r"builtin type \w+ has no __module__", DeprecationWarning
            )
            return [each for file in files for each in _operations(file, module, scopes)]
    except Exception as error:  # noqa: BLE001  # whatever the profiler raises
        log(
            logging.WARNING,
            "the recorded profile of a step could not be read: %s: %s",
            type(error).__name__,
            error,
        )
        return []


def _scopes(text: str) -> Iterator[tuple[str, _Scope]]:
    """By the name of an instruction its phase, depth and ticks, and the words of its path.

    Containers have none.
    """
    for line in text.splitlines():
        named = _INSTRUCTION.match(line)
        if named is None or _CONTAINER.search(line):
            continue
        path = _OP_NAME.search(line)
        words = [] if path is None else _WORDS.split(path.group(1))
        phase = next((word for word in words if word in PHASES), "")
        ticks = next((found for word in words if (found := _TICKS.fullmatch(word))), None)
        both = (0, 0) if ticks is None else (int(ticks.group(1)), int(ticks.group(2)))
        yield named.group(1), (phase, words.count("while"), both, frozenset(words))


def _operations(file: Path, module: str, scopes: Mapping[str, _Scope]) -> Iterator[Operation]:
    data: Any = jax.profiler.ProfileData.from_file(str(file))
    for plane in data.planes:
        of_plane = re.fullmatch(r"/device:\w+:(\d+)", plane.name)
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                name = str(stats.get("hlo_op"))
                if stats.get("hlo_module") != module or name not in scopes:
                    continue
                # Simulated devices are told apart by a number of the event, others by the plane it
                # is in.
                device = int(of_plane.group(1)) if of_plane else int(stats.get("device_ordinal", 0))
                start_s = event.start_ns * 1e-9
                yield Operation(
                    device, name, *scopes[name], start_s, start_s + event.duration_ns * 1e-9
                )
