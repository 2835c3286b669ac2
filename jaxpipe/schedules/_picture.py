"""Pictures of schedules: SVG without a library, PNG with matplotlib."""

import html
import importlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from jaxpipe._util.files import write_file
from jaxpipe._util.paths import local_path
from jaxpipe._util.text import svg_start
from jaxpipe.errors import ScheduleError

from ._cost import Kind, Slice, timeline
from ._lowering import lower_schedule
from ._program import TickProgram
from ._stages import AnySchedule

_COLOURS: dict[Kind, str] = {
    "forward": "#5b8ff9",
    "backward": "#5ad8a6",
    "input gradient": "#f6bd16",
    "weight gradient": "#c2a5f0",
}
_WIDTH = 1000
_ROW = 26
_LEFT = 64
_TOP = 44
_LETTER = 7
"""Width of a digit in pixels. Numbers that do not fit into their action are left out."""


@dataclass(frozen=True)
class Picture:
    """A picture of a step: one row per stage, time to the right, microbatches as numbers.

    Notebooks display it.

    Attributes:
        title: The title above the picture.
        slices: The actions.
        num_stages: Number of stages.
        num_chunks: Chunks per stage. Later chunks are drawn paler.
    """

    title: str
    slices: Sequence[Slice] = field(repr=False)
    num_stages: int
    num_chunks: int

    @property
    def span_s(self) -> float:
        """Duration of the step in seconds."""
        return max((one.end_s for one in self.slices), default=0.0)

    def svg(self) -> str:
        """Return the picture as a self-contained SVG."""
        scale = _WIDTH / (self.span_s or 1.0)
        bottom = _TOP + self.num_stages * _ROW
        ink = 'class="jaxpipe-ink" fill="#222222"'
        lines = [
            *svg_start(_LEFT + _WIDTH + 16, bottom + 12),
            f'<text x="8" y="16" font-weight="bold" {ink}>{html.escape(self.title)}</text>',
        ]
        x = _LEFT
        for kind in self._kinds():
            lines.append(f'<rect x="{x}" y="24" width="12" height="12" fill="{_COLOURS[kind]}"/>')
            lines.append(f'<text x="{x + 16}" y="35" {ink}>{kind}</text>')
            x += 40 + _LETTER * len(kind)
        for stage in range(self.num_stages):
            y = _TOP + stage * _ROW
            lines.append(f'<text x="8" y="{y + 17}" {ink}>stage {stage}</text>')
            size = f'width="{_WIDTH}" height="{_ROW - 4}"'
            lane = f'<rect x="{_LEFT}" y="{y + 2}" {size} class="jaxpipe-lane" fill="#eeeeee"/>'
            lines.append(lane)
        lines += [line for one in self.slices for line in self._slice(one, scale)]
        return "\n".join([*lines, "</svg>", ""])

    def save(self, path: str | PathLike[str]) -> None:
        """Write the picture to a file.

        Args:
            path: A path that ends with `.svg` or `.png`. PNG requires matplotlib
                (`jaxpipe[plots]`).

        Raises:
            ScheduleError: The path has another suffix, or matplotlib is not installed.
        """
        target = local_path(path, "path", ScheduleError)
        if target.suffix == ".svg":
            write_file(target, self.svg())
        elif target.suffix == ".png":
            self._save_png(target)
        else:
            raise ScheduleError(
                "A picture must be saved to a path ending with .svg or .png, but got "
                f"path={str(path)!r}. Add one."
            )

    def _repr_svg_(self) -> str:
        return self.svg()

    def _kinds(self) -> list[Kind]:
        found = {one.kind for one in self.slices}
        return [kind for kind in _COLOURS if kind in found]

    def _opacity(self, one: Slice) -> float:
        # With one chunk all actions are opaque; with several, later chunks are paler.
        if self.num_chunks == 1:
            return 1.0
        return round(1 - 0.6 * (one.part // self.num_stages) / (self.num_chunks - 1), 2)

    def _slice(self, one: Slice, scale: float) -> list[str]:
        x = _LEFT + one.start_s * scale
        width = (one.end_s - one.start_s) * scale
        y = _TOP + one.stage * _ROW
        text = str(one.microbatch)
        about = (
            f"{one.kind} of microbatch {one.microbatch} on stage {one.stage}, part {one.part}, "
            f"tick {one.tick}"
        )
        times = f"{one.start_s:g} to {one.end_s:g} s"
        lines = [
            f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{_ROW - 4}" '
            f'fill="{_COLOURS[one.kind]}" fill-opacity="{self._opacity(one):g}" '
            f'stroke="#ffffff" stroke-width=".5"><title>{about}, {times}</title>'
            "</rect>"
        ]
        if width > _LETTER * len(text) + 2:
            middle = f'x="{x + width / 2:.2f}" y="{y + 17}" text-anchor="middle"'
            lines.append(f'<text {middle} fill="#222" pointer-events="none">{text}</text>')
        return lines

    def _save_png(self, path: Path) -> None:
        try:
            make: Any = importlib.import_module("matplotlib.figure").Figure
        except ImportError as error:
            raise ScheduleError(
                f"matplotlib must be installed to draw a PNG, but got path={str(path)!r} without "
                "it. Run pip install 'jaxpipe[plots]', or save an .svg."
            ) from error
        figure = make(figsize=(12, 1 + 0.32 * self.num_stages), layout="constrained")
        axes = figure.subplots()
        for kind in self._kinds():
            named = kind
            for one in self.slices:
                if one.kind == kind:
                    width = one.end_s - one.start_s
                    colour = _COLOURS[kind]
                    shade = self._opacity(one)
                    axes.barh(
                        one.stage,
                        width,
                        left=one.start_s,
                        color=colour,
                        alpha=shade,
                        edgecolor="w",
                        label=named,
                    )
                    named = ""
                    if width > 0.012 * self.span_s:
                        middle = (one.start_s + one.end_s) / 2
                        axes.text(
                            middle,
                            one.stage,
                            str(one.microbatch),
                            ha="center",
                            va="center",
                            fontsize=7,
                        )
        axes.set_title(self.title, loc="left", fontsize=10)
        axes.set_yticks(
            range(self.num_stages), [f"stage {stage}" for stage in range(self.num_stages)]
        )
        axes.invert_yaxis()
        axes.set_xlim(0, self.span_s or 1.0)
        axes.set_xlabel("s")
        figure.legend(loc="outside upper right", fontsize=7, ncols=len(_COLOURS))
        content = io.BytesIO()
        figure.savefig(content, dpi=150, format="png")
        write_file(path, content.getvalue())


def draw(
    schedule: AnySchedule | TickProgram,
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    weight_s: float | None = None,
    lockstep: bool = True,
    training: bool = True,
) -> Picture:
    """Draw a schedule to scale: what each stage does and when, for the given action times.

    Args:
        schedule: A name, a schedule class, the object of one stage, the objects of all stages in
            order, or a lowered program.
        num_microbatches: Microbatches in a batch. Required with a name or class.
        num_stages: Pipeline stages. Required with a name or class.
        forward_s: Seconds of the forward of one microbatch through all chunks of a stage.
        backward_s: Seconds of the whole backward of that microbatch.
        weight_s: Seconds of the weight gradient, if backwards are split. Default: half of
            `backward_s`.
        lockstep: Whether stages wait for each other after each tick, as in the executor.
        training: False for a forward-only schedule.

    Returns:
        The picture. Save it with `draw(...).save("schedule.svg")`; notebooks display it.

    Raises:
        ScheduleError: The schedule is not sound, or the times are invalid.

    Example:
        >>> picture = draw("1f1b", num_microbatches=8, num_stages=4)
        >>> picture.title
        'OneFOneBSchedule: 8 microbatches on 4 stages, 27.3% idle'
    """
    program = schedule
    if not isinstance(program, TickProgram):
        program = lower_schedule(program, num_microbatches, num_stages, training=training)
    slices = timeline(program, forward_s, backward_s, weight_s=weight_s, lockstep=lockstep)
    return picture_of(program, slices)


def picture_of(program: TickProgram, slices: Sequence[Slice]) -> Picture:
    """Draw the actions of a program, planned or measured."""
    work = sum(one.end_s - one.start_s for one in slices)
    span = max((one.end_s for one in slices), default=0.0)
    idle = f", {1 - work / (span * program.num_stages):.1%} idle" if span > 0 else ""
    sizes = f"{program.num_microbatches} microbatches on {program.num_stages} stages"
    title = f"{program.name}: {sizes}{idle}"
    return Picture(title, tuple(slices), program.num_stages, program.num_chunks)
