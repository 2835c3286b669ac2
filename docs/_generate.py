"""What is written when the documentation is built: schedules, a plan, docstrings' markup."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from jaxpipe import PipelineModule, plan
from jaxpipe.losses import cross_entropy
from jaxpipe.models import LlamaConfig, llama
from jaxpipe.models._families import FAMILIES
from jaxpipe.schedules import draw, lower_schedule, makespan, schedule_names


def _markdown(text: str) -> str:
    return _joined_spans(text).replace("|", "\\|")


def _joined_spans(text: str) -> str:
    """The text with each code span on one line.

    A formula whose second line begins with a minus sign would otherwise begin a list.
    """
    return re.sub(r"(?<!`)`[^`]+`(?!`)", lambda span: " ".join(span[0].split()), text)


def write_llms(app: Sphinx) -> None:
    """Write `llms.txt`: what the project is, and every page as plain text, for language models."""
    pages = [
        f"- [{title.astext()}](_sources/{app.env.doc2path(page, base=False)}.txt)"
        for page, title in sorted(app.env.titles.items())
    ]
    about = (
        "Pipeline parallelism for JAX and Flax, with DeepSpeed's names and one device's numbers."
    )
    text = "\n".join([f"# {app.config.project}", "", f"> {about}", "", "## Pages", "", *pages, ""])
    Path(app.outdir, "llms.txt").write_text(text, encoding="utf-8")


def write_schedules(folder: Path, num_microbatches: int = 8, num_stages: int = 4) -> None:
    """Write what each schedule is, with its picture and its figures, beside one another.

    Args:
        folder: Where the Markdown file, which `schedules.md` includes, and the pictures go.
        num_microbatches: Of the pictures.
        num_stages: Of the pictures.
    """
    folder.mkdir(exist_ok=True)
    rows = [
        "| schedule | chunks | step time | idle | microbatches in flight, stage by stage |",
        "|---|---|---|---|---|",
    ]
    parts: list[str] = []
    for name, kind in schedule_names().items():
        picture = draw(kind, num_microbatches, num_stages)
        picture.save(str(folder / f"{name}.svg"))
        program = lower_schedule(kind, num_microbatches, num_stages)
        stages = [kind(num_microbatches, num_stages, stage) for stage in range(num_stages)]
        held = ", ".join(f"{stage.num_pipe_buffers() / kind.num_chunks:g}" for stage in stages)
        step_s = makespan(program, 1.0, 2.0)
        idle = 1 - 3 * num_microbatches / step_s
        rows.append(
            f"| [`{name}`](#{name}) | {kind.num_chunks} | {step_s:g} | {idle:.1%} | {held} |"
        )
        text = inspect.cleandoc(kind.__doc__ or "").split("\nArgs:")[0].split("\nAttributes:")[0]
        parts += [f"({name})=", f"## {name}", "", _markdown(text), ""]
        parts += [f"![{picture.title}](_build/{name}.svg)", ""]
    (folder / "schedules.md").write_text("\n".join([*rows, "", *parts]) + "\n", encoding="utf-8")


def write_families(folder: Path) -> None:
    """Write the families of the Llama decoder, which `models_and_weights.md` includes.

    Args:
        folder: Where to.
    """
    folder.mkdir(exist_ok=True)
    rows = ["| family | `model_type` | text part of | written as |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        whole = f"`{family.text_of}`" if family.text_of else ""
        classes = f"`{family.classes}ForCausalLM`"
        rows.append(f"| {family.title} | `{name}` | {whole} | {classes} |")
    (folder / "families.md").write_text("\n".join(rows) + "\n", encoding="utf-8")


def write_plan(folder: Path) -> None:
    """Write `plan.html`, the page of a plan of Llama 3 8B on eight H200s.

    Args:
        folder: Where to.
    """
    folder.mkdir(exist_ok=True, parents=True)
    sizes = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 32,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    }
    model = PipelineModule(llama(sizes), num_stages=4, loss_fn=cross_entropy)
    tokens = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    schedules = ["1f1b", "interleaved", "zero-bubble"]
    found = plan(model, config, (tokens, tokens), "h200:8", schedules=schedules, alternatives=False)
    found.to_html(folder / "plan.html")


def mark_code(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Turn a docstring's code spans into reStructuredText, names into references.

    Args:
        app: Not looked at, nor are the next four: these are the arguments of
            `autodoc-process-docstring`.
        what: Kind of object.
        name: Its name.
        obj: The object.
        options: Of the directive.
        lines: The docstring's lines, which are replaced.
    """
    text = re.sub(r"(?<![`:])`([^`]+)`(?!`)(?=(\w?))", _code, _joined_spans("\n".join(lines)))
    # Napoleon takes what stands before the first colon of a result for its type: here it is none.
    lines[:] = re.sub(r"^( *(?:Returns|Yields):\n +)", r"\1: ", text, flags=re.MULTILINE).split(
        "\n"
    )


def _code(span: re.Match[str]) -> str:
    # A span that a letter follows needs an end of its own, which is not shown.
    end = "\\ " if span[2] else ""
    if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", span[1]):
        return f":py:obj:`{span[1]}`{end}"
    return f"``{span[1]}``{end}"


def find_in_package(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: Element
) -> Element | None:
    """Find a name in the package that its own room lacks, as `PipelineModule.init`.

    Args:
        app: The builder's application.
        env: What is known of all pages.
        node: The reference.
        text: What it shows.

    Returns:
        A link; None: the package has no such name, which then is code alone.
    """
    if node["refdomain"] != "py":
        return None
    node["py:module"], node["py:class"] = "jaxpipe", None
    place = env, node["refdoc"], app.builder, node["reftype"], node["reftarget"]
    return env.domains["py"].resolve_xref(*place, node, text)


def hide_arguments(app: object, what: str, name: str, *rest: object) -> tuple[str, None] | None:
    """Leave the arguments away of classes that only the library makes.

    Args:
        app: Not looked at.
        what: Not looked at.
        name: The object's name.
        rest: Not looked at.

    Returns:
        An empty signature for those classes, None for everything else.
    """
    made = {
        "jaxpipe.engine.Engine",
        "jaxpipe.PipelineEngine",
        "jaxpipe.UnpipelinedEngine",
        "jaxpipe.Pipeline",
    }
    return ("", None) if name in made else None
