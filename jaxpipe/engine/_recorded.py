"""Recording of a step's operations with JAX's profiler, by phase and layer."""

import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from jaxpipe.distributed import log
from jaxpipe.programs.compiled import Module

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
"""Scopes of the executor's operations, in the order of a step; the outermost one counts."""

_TICKS = re.compile(r"ticks_(\d+)_(\d+)")
_Scope = tuple[str, int, tuple[int, int], frozenset[str]]
_WORDS = re.compile(r"[/(),]+")


class Operation(NamedTuple):
    """An operation that a device has run.

    Attributes:
        device: The device's number in this process, `local_hardware_id`.
        name: Its name in the compiled program.
        phase: Its scope of the executor; empty if it is outside all scopes.
        depth: Number of loops around it, including the loop over ticks.
        ticks: First tick of its run of ticks, and the tick after the last. Both are equal if it is
            outside all runs.
        words: Names of the scopes around it, including the names of layers.
        start_s: Its start, in seconds after the first operation began.
        end_s: Its end, in seconds after the first operation began.
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
    """Return the result of a call and the operations that the devices of this process ran in it.

    `text` is the compiled program. Raises RuntimeError, without calling, if another profile is
    being recorded.
    """
    scopes = dict(_scopes(text))
    module = text.split(None, 2)[1].rstrip(",")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # recording Python calls would take longer than a step
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
    """End the recording; errors are logged, so that the call's result is never lost."""
    try:
        jax.profiler.stop_trace()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        with warnings.catch_warnings():
            # Python 3.12 and newer warn about jaxlib 0.10's types. If warnings are errors, that
            # aborts the process.
            warnings.filterwarnings(
                "ignore", r"builtin type \w+ has no __module__", DeprecationWarning
            )
            return [each for file in files for each in _operations(file, module, scopes)]
    except Exception as error:  # noqa: BLE001  # the profiler may raise any type
        log(
            logging.WARNING,
            "the recorded profile of a step could not be read: %s: %s",
            type(error).__name__,
            error,
        )
        return []


def _scopes(text: str) -> Iterator[tuple[str, _Scope]]:
    """Yield the name of each instruction with its phase, depth, ticks and the words of its path."""
    for line in chain.from_iterable(lines.values() for lines in Module(text).computations.values()):
        # The events of these only contain events of other instructions.
        if line.op in ("while", "conditional", "call"):
            continue
        words = _WORDS.split(line.scope)
        phase = next((word for word in words if word in PHASES), "")
        ticks = next((found for word in words if (found := _TICKS.fullmatch(word))), None)
        both = (0, 0) if ticks is None else (int(ticks.group(1)), int(ticks.group(2)))
        yield line.name, (phase, words.count("while"), both, frozenset(words))


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
                # An event of a simulated device has the device's number; for other devices the
                # event's plane identifies the device.
                device = int(of_plane.group(1)) if of_plane else int(stats.get("device_ordinal", 0))
                start_s = event.start_ns * 1e-9
                yield Operation(
                    device, name, *scopes[name], start_s, start_s + event.duration_ns * 1e-9
                )
