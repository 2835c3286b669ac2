"""A plan as one self-contained HTML page.

The page has tables, bars of memory, and the schedule drawn to scale.
"""

import html
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from jaxpipe._util.text import html_page, html_table, svg_start
from jaxpipe.core.planner import Forecast
from jaxpipe.schedules import draw, resolve_schedule

if TYPE_CHECKING:
    from ._result import StepPlan

_COLOURS = ("#5b8ff9", "#5d7092", "#f6bd16", "#5ad8a6", "#c2a5f0", "#e8684a")
_MOST_BARS = 24
_BAR = 22
_LETTER = 6.5
ALTERNATIVE_SIDES = "<<<>>>"
"""Sides of the columns of the table of other settings, as `format_table` has them."""
_WIDTH = 620


def page_of(
    plan: "StepPlan",
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    stages: Sequence[Sequence[str]],
    others: Sequence[Sequence[str]],
) -> str:
    """Return the page, with tables of candidates, stages and other settings, headings first."""
    title, *_ = str(plan).splitlines()
    return html_page("jaxpipe plan", body_of(plan, heads, rows, stages, others, title))


def body_of(
    plan: "StepPlan",
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    stages: Sequence[Sequence[str]],
    others: Sequence[Sequence[str]],
    title: str,
    level: int = 1,
) -> str:
    """Return the body of the page, as notebooks show it below their own headings."""
    shown = plan.shown
    inner = f"h{level + 1}"
    parts = [f"<h{level}>Plan</h{level}>", f"<p>{html.escape(title)}</p>"]
    if plan.advice:
        parts.append(f'<p class="advice">{html.escape(plan.advice)}</p>')
    if plan.measured_step_s is not None:
        ratio = plan.measured_step_s / shown.step_s
        parts.append(
            f"<p>Measured step {plan.measured_step_s * 1e3:,.1f} ms, {ratio:.2f} times the "
            "forecast.</p>"
        )
    if plan.compiled is not None:
        parts.append(f"<p>{html.escape(str(plan.compiled))}</p>")
    parts += [
        f"<{inner}>Candidates</{inner}>",
        html_table(heads, rows, ">"),
        *(
            [
                f"<{inner}>Other settings</{inner}>",
                html_table(others[0], others[1:], ALTERNATIVE_SIDES),
            ]
            if others
            else []
        ),
        f"<{inner}>Memory of a device</{inner}>",
        _bars(plan),
        f"<{inner}>Schedule of {html.escape(shown.label)}</{inner}>",
        _picture(plan, shown),
        f"<{inner}>Stages</{inner}>",
        html_table(stages[0], stages[1:], ">"),
        f"<{inner}>Assumed, not measured</{inner}>",
        "<ul>",
        *(f"<li>{html.escape(each)}</li>" for each in plan.assumptions),
        "</ul>",
    ]
    return "\n".join(parts)


def _bars(plan: "StepPlan") -> str:
    shown = plan.candidates[:_MOST_BARS]
    limit = plan.limit_bytes
    scale = _WIDTH / max(limit, *(one.memory.total for one in shown))
    left = 24 + round(_LETTER * max(len(one.label) for one in shown))
    names = [field.name for field in fields(shown[0].memory)]
    height = 40 + _BAR * len(shown)
    ink = 'class="jaxpipe-ink" fill="#222222"'
    lines = svg_start(left + _WIDTH + 80, height)
    x = 8
    for name, colour in zip(names, _COLOURS, strict=True):
        words = name.replace("_", " ")
        lines.append(f'<rect x="{x}" y="6" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 16}" y="17" {ink}>{words}</text>')
        x += 40 + 7 * len(words)
    for row, one in enumerate(shown):
        y = 30 + row * _BAR
        x = float(left)
        lines.append(f'<text x="8" y="{y + 14}" {ink}>{html.escape(one.label)}</text>')
        for name, colour in zip(names, _COLOURS, strict=True):
            size = getattr(one.memory, name)
            about = f"<title>{name.replace('_', ' ')}: {size / 1e9:.2f} GB</title>"
            place = f'x="{x:.1f}" y="{y}" width="{size * scale:.1f}" height="{_BAR - 4}"'
            lines.append(f'<rect {place} fill="{colour}">{about}</rect>')
            x += size * scale
        total = f"{one.memory.total / 1e9:.1f}"
        lines.append(f'<text x="{x + 4:.1f}" y="{y + 14}" {ink}>{total}</text>')
    edge = left + limit * scale
    lines.append(
        f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="24" y2="{height}" stroke="#c00" '
        'stroke-dasharray="4 3"/>'
    )
    return "\n".join([*lines, "</svg>"])


def _picture(plan: "StepPlan", shown: Forecast) -> str:
    """Draw a step with the times of the slowest stage; of fewer microbatches if there are many."""
    num_stages = plan.axes["stage"]
    forward, backward = (
        max(getattr(stage, name) for stage in shown.stages) for name in ("forward_s", "backward_s")
    )
    if forward + backward <= 0:
        return ""
    drawn = min(plan.num_microbatches, 3 * num_stages)
    picture = draw(
        resolve_schedule(shown.schedule, shown.num_chunks, shown.max_pending),
        drawn,
        num_stages,
        forward_s=forward,
        backward_s=backward,
    ).svg()
    if drawn == plan.num_microbatches:
        return picture
    note = (
        f"A step of {drawn} microbatches, so that each one can be seen. The plan's step has "
        f"{plan.num_microbatches}, and is idle for {shown.bubble:.1%} of its ticks."
    )
    return f"<p>{note}</p>\n{picture}"
