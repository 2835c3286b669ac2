"""The stage-by-step grid of a schedule, as text."""

from collections.abc import Callable, Iterable, Sequence

from ._base import PipeSchedule
from ._instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    PipeInstruction,
    RecvActivation,
)
from ._stages import AnySchedule, listed_steps, stage_schedules

Label = tuple[int | None, int | None]
"""A chunk and a microbatch, if known."""


def format_grid(
    schedule: AnySchedule,
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    *,
    max_width: int | None = None,
    max_rows: int | None = None,
    mark: tuple[int, int] | None = None,
) -> str:
    """Format which microbatch each stage works on in each step.

    Rows are stages and columns are steps. `F3` is the forward of microbatch 3, `B3` its backward,
    and `I3` and `W3` the input gradient and the weight gradient of a split backward. `F3B1` is two
    actions in one step, and `.` is an idle step. With several chunks per stage, the number before
    the letter is the virtual stage: `5F3+2B1`. The schedule need not be sound.

    Args:
        schedule: A name, a schedule class, the object of one stage, or the objects of all stages in
            order.
        num_microbatches: Microbatches in a batch. Required with a name or class.
        num_stages: Pipeline stages. Required with a name or class.
        max_width: The maximum length of a line. Steps in the middle, or far from `mark`, are left
            out. Default: no limit.
        max_rows: The maximum number of stages to show. Stages in the middle, or far from `mark`,
            are left out. Default: no limit.
        mark: Stage and step of a cell to put in brackets. A cell outside the grid is ignored.

    Returns:
        Lines without trailing spaces, joined by newlines.

    Raises:
        ScheduleError: The class, the objects or the sizes are not a valid schedule.

    Example:
        >>> print(format_grid(OneFOneBSchedule, 3, 2))
        step     0   1     2     3     4
        stage 0  F0  F1    F2B0  B1    B2
        stage 1  .   F0B0  F1B1  F2B2  .
    """
    schedules = stage_schedules(schedule, num_microbatches, num_stages)
    cells = [_stage_cells(one) for one in schedules]
    num_steps = max(map(len, cells))
    for row in cells:
        row += ["."] * (num_steps - len(row))
    if mark is not None and mark[0] < len(cells) and mark[1] < num_steps:
        cells[mark[0]][mark[1]] = f"[{cells[mark[0]][mark[1]]}]"
    names = [f"stage {stage}" for stage in range(len(cells))]
    widths = [max(len(str(step)), *(len(row[step]) for row in cells)) for step in range(num_steps)]
    label_width = max(map(len, names))
    room = None if max_width is None else max_width - label_width
    # 2 spaces before each column; 5 characters for the dots of omitted columns with their spaces.
    steps = _visible(
        [width + 2 for width in widths], room, None if mark is None else mark[1], gap=5
    )
    rows = _visible([1] * len(cells), max_rows, None if mark is None else mark[0], gap=1)
    lines = [_line("step", label_width, steps, widths, str)]
    for stage in rows:
        if stage is None:
            lines.append("...")
        else:
            lines.append(_line(names[stage], label_width, steps, widths, cells[stage].__getitem__))
    return "\n".join(lines)


def _line(
    label: str,
    label_width: int,
    steps: Sequence[int | None],
    widths: Sequence[int],
    text: Callable[[int], str],
) -> str:
    parts = [label.ljust(label_width)]
    parts += ["..." if step is None else text(step).ljust(widths[step]) for step in steps]
    return "  ".join(parts).rstrip()


def _visible(
    sizes: Sequence[int], room: int | None, centre: int | None, *, gap: int
) -> list[int | None]:
    """Choose the indices that fit: those around `centre`, or from both ends. None marks a gap."""
    count = len(sizes)
    if room is None or sum(sizes) <= room:
        return list(range(count))
    if centre is None:
        order = sorted(range(count), key=lambda index: (min(index, count - 1 - index), index))
    else:
        order = sorted(range(count), key=lambda index: (abs(index - centre), index))
    # Around a centre there may be a gap on both sides; from both ends there is only one in between.
    left = room - sizes[order[0]] - gap * (1 if centre is None else 2)
    visible = {order[0]}
    for index in order[1:]:
        left -= sizes[index]
        if left < 0:
            break
        visible.add(index)
    shown: list[int | None] = []
    for index in range(count):
        if index in visible:
            shown.append(index)
        elif not shown or shown[-1] is not None:
            shown.append(None)
    return shown


def _stage_cells(schedule: PipeSchedule) -> list[str]:
    """Label the steps of one stage, tracking the buffers as far as possible."""
    living: dict[object, Label] = {}
    entered: set[object] = set()
    following: dict[int | None, int] = {}
    letters = {ForwardPass: "F", BackwardPass: "B", BackwardInput: "I", BackwardWeight: "W"}
    cells: list[str] = []
    for commands in listed_steps(schedule):
        cell: list[str] = []
        for op in _buffer_ops(commands):
            buffer = op.buffer_id
            enters = isinstance(op, (LoadMicroBatch, RecvActivation, ForwardPass))
            # Unsound schedules must be shown too, so nothing is rejected: the numbers follow from
            # the order in which buffers are filled.
            if enters and buffer not in entered:
                chunk = op.chunk_id
                microbatch = op.micro_batch_id
                if microbatch is None:
                    microbatch = following.get(chunk, 0)
                following[chunk] = microbatch + 1
                living[buffer] = (chunk, microbatch)
                entered.add(buffer)
            if isinstance(op, ForwardPass):
                entered.discard(buffer)
            letter = next((letters[base] for base in type(op).__mro__ if base in letters), None)
            if letter is not None:
                cell.append(_cell(schedule, letter, op, living.get(buffer, (None, None))))
        cells.append(("" if schedule.num_chunks == 1 else "+").join(cell) or ".")
    return cells


def _buffer_ops(commands: object) -> list[BufferOpInstruction]:
    if not isinstance(commands, Iterable):
        return []
    listed: list[PipeInstruction] = list(commands)  # pyright: ignore[reportUnknownArgumentType]
    return [op for op in listed if isinstance(op, BufferOpInstruction)]


def _cell(schedule: PipeSchedule, letter: str, op: BufferOpInstruction, living: Label) -> str:
    chunk = living[0] if op.chunk_id is None else op.chunk_id
    microbatch = living[1] if op.micro_batch_id is None else op.micro_batch_id
    shown = "?" if microbatch is None else str(microbatch)
    if schedule.num_chunks == 1:
        return f"{letter}{shown}"
    if chunk is None or chunk not in range(schedule.num_chunks):
        return f"?{letter}{shown}"
    part = schedule.virtual_stage(schedule.stage_id, chunk)
    return f"{part}{letter}{shown}"
