"""The HTML that notebooks show for an engine."""

import html
from collections.abc import Mapping

from jaxpipe._util.text import html_table
from jaxpipe.core.pipeline import Pipeline
from jaxpipe.layers import PipelineModule
from jaxpipe.schedules import draw

_CELL = "padding: 0.1em 1em 0.1em 0"
"""Overrides the style of notebooks, which align tables right or centre and pack cells closely."""

_MOST_ACTIONS = 4096
"""The most actions that a drawn schedule may have; a browser takes seconds for more."""


def engine_html(
    title: str, module: PipelineModule, pipeline: Pipeline | None, facts: Mapping[str, object]
) -> str:
    """Return self-contained HTML: an engine's facts, its layers by stage and its schedule."""
    lines = [
        f"<div><p><b>{html.escape(title)}</b></p>",
        html_table((), [(k, str(v)) for k, v in facts.items()], cell_style=_CELL),
    ]
    names = [named.name for named in module.layers]
    if pipeline is None:
        lines.append(
            f"<p>{html.escape(', '.join(names))}; the cut is known with the shapes of a "
            "batch.</p></div>"
        )
        return "\n".join(lines)
    # Everything is known from shapes: nothing is read from the devices.
    num_params = pipeline.trace.num_params()
    ends = pipeline.stage.ends.layers
    parts = zip(
        pipeline.plan.parts,
        pipeline.plan.parts[1:],
        pipeline.plan.program.placement.stages,
        strict=False,
    )
    rows = [["all", "", names[i], f"{num_params[i]:,}"] for i in ends]
    for part, (start, stop, stage) in enumerate(parts):
        own = [i for i in range(start, stop) if i not in ends]
        listed = ", ".join(names[i] for i in own)
        rows.append([str(stage), str(part), listed, f"{sum(num_params[i] for i in own):,}"])
    lines.append(html_table(["stage", "part", "layers", "parameters"], rows, "<<<>", _CELL))
    program = pipeline.plan.program
    if program.num_stages * program.num_microbatches * program.num_chunks * 2 <= _MOST_ACTIONS:
        lines.append(draw(program).svg())
    return "\n".join([*lines, "</div>"])
