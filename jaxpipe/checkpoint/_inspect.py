"""A description of a checkpoint as text, made only from its index."""

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from os import PathLike

import jax.numpy as jnp

from jaxpipe._util.stores import StorePath
from jaxpipe._util.text import format_bytes, format_table
from jaxpipe.core.state import Leaf
from jaxpipe.errors import CheckpointError, counted

from ._directory import committed_tags
from ._index import Index, StoredLayer
from ._open import Checkpoint, open_checkpoint, reread
from ._storage import file_sizes

_AXES = {"stage": "stage", "data": "replica", "model": "model shard"}
_PARTS = {
    "params/": "parameters",
    "collections/": "beside the parameters",
    "opt_state/": "state of the optimiser",
}


@dataclass(frozen=True)
class _Totals:
    """Totals of some leaves."""

    num_arrays: int
    num_elements: int
    num_bytes: int


def inspect_checkpoint(path: str | PathLike[str] | StorePath, tag: str | None = None) -> str:
    """Describe a checkpoint: when and how it was written, its layers by stage, and its size.

    No array is read.

    Args:
        path: The directory that was passed to `save_checkpoint`, or a checkpoint's own folder.
        tag: Name of the checkpoint. None selects the latest.

    Returns:
        Lines without a newline at the end. Those of layers are as long as the list of their shapes.

    Raises:
        CheckpointError: There is no checkpoint, or its index is damaged.
    """
    checkpoint = reread(path, lambda: open_checkpoint(path, tag))
    blocks = [_facts(checkpoint), _layers(checkpoint.index), _totals(checkpoint)]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _facts(checkpoint: Checkpoint) -> list[str]:
    index = checkpoint.index
    commit = checkpoint.commit
    scalars = index.scalars
    topology = " x ".join(counted(n, _AXES.get(axis, axis)) for axis, n in index.mesh.items())
    scale = scalars["loss_scale"].get("scale")
    places = sum(
        isinstance(each, dict) and each.get("state") is not None for each in index.data_iterators
    )
    beside = [f"client state ({', '.join(index.client_state)})"] if index.client_state else []
    beside += [f"the place of {counted(places, 'data iterator')}"] if places else []
    versions = [
        f"{name} {version}" for name, version in index.versions.items() if version[:1].isdigit()
    ]
    facts = {
        "checkpoint": str(checkpoint.path),
        "tag": checkpoint.tag + ("" if commit.is_latest else " (saved with save_latest=False)"),
        "saved": _moment(commit.saved_at),
        "trained": f"{counted(index.global_steps, 'step')}, "
        f"{counted(index.global_samples, 'sample')}"
        + (
            f", {counted(scalars['skipped_steps'], 'step')} skipped"
            if scalars["skipped_steps"]
            else ""
        ),
        "topology": f"{topology}, ZeRO stage {index.zero_stage}",
        "loss scale": "" if scale is None else f"{scale:,.12g}",
        "also holds": ", ".join(beside),
        "written with": ", ".join(versions),
        "beside it": _others(checkpoint),
    }
    return format_table([fact for fact in facts.items() if fact[1]], "<")


def _moment(text: str) -> str:
    try:
        moment = datetime.datetime.fromisoformat(text).astimezone(datetime.UTC)
    except ValueError:
        return text
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _others(checkpoint: Checkpoint) -> str:
    """List the other checkpoints of the directory."""
    try:
        commits = committed_tags(checkpoint.path.parent)
    except CheckpointError as error:
        return str(error)
    others = [
        f"{tag} ({counted(each.global_steps, 'step')})"
        for tag, each in commits.items()
        if tag != checkpoint.tag
    ]
    return ", ".join(others) or "no other checkpoint"


def _layers(index: Index) -> list[str]:
    """Stages and their layers; equal neighbours share a row."""
    heads = ("stage", "layers", "parameters", "size", "one microbatch before and after", "shapes")
    rows: list[tuple[str, ...]] = [heads]
    for stage, members in groupby(index.layers, lambda layer: layer.stage):
        layers = list(members)
        rows.append(_row(index, str(stage), counted(len(layers), "layer"), layers, "", ""))
        for (_, signature, shapes), run in groupby(
            layers, lambda layer: (layer.kind, layer.signature, _shapes(index, layer))
        ):
            equal = list(run)
            names = [equal[0].name, *[layer.name for layer in equal[1:]][-1:]]
            rows.append(_row(index, "", f"  {' .. '.join(names)}", equal, signature, shapes))
    return format_table(rows, "><>><<")


def _row(
    index: Index, stage: str, name: str, layers: Sequence[StoredLayer], *texts: str
) -> tuple[str, ...]:
    total = _sum(index.leaves, {key for layer in layers for key in layer.parameters})
    return (stage, name, f"{total.num_elements:,}", format_bytes(total.num_bytes), *texts)


def _shapes(index: Index, layer: StoredLayer) -> str:
    """The parameters of a layer with their shapes, by dtype; tied ones with their full path."""
    own = f"params/layers/{layer.name}/"
    by_dtype: dict[str, list[str]] = {}
    for key in layer.parameters:
        leaf = index.leaves[key]
        name = key.removeprefix(own).removeprefix("params/")
        by_dtype.setdefault(leaf.dtype, []).append(f"{name} [{', '.join(map(str, leaf.shape))}]")
    return "; ".join(f"{dtype}: {', '.join(names)}" for dtype, names in by_dtype.items())


def _totals(checkpoint: Checkpoint) -> list[str]:
    index = checkpoint.index
    leaves = checkpoint.index.leaves
    uses = [key for layer in index.layers for key in layer.parameters]
    rows = [("in all", "elements", "arrays", "size")]
    for prefix, name in _PARTS.items():
        total = _sum(leaves, [key for key in leaves if key.startswith(prefix)])
        if total.num_arrays:
            once = (
                ", shared ones once" if prefix == "params/" and len(uses) > total.num_arrays else ""
            )
            rows.append(
                (
                    name + once,
                    f"{total.num_elements:,}",
                    f"{total.num_arrays:,}",
                    format_bytes(total.num_bytes),
                )
            )
    sizes = file_sizes(checkpoint.path)
    rows.append(
        (
            f"on disk, in {counted(len(sizes), 'file')}",
            "",
            f"{len(index.arrays):,}",
            format_bytes(sum(sizes)),
        )
    )
    return format_table(rows, "<>>>")


def _sum(leaves: Mapping[str, Leaf], keys: Iterable[str]) -> _Totals:
    found = [leaves[key] for key in keys]
    sizes = [math.prod(leaf.shape) for leaf in found]
    num_bytes = sum(
        size * jnp.dtype(leaf.dtype).itemsize for size, leaf in zip(sizes, found, strict=True)
    )
    return _Totals(len(found), sum(sizes), num_bytes)
