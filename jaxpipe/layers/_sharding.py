"""Shardings of variables inside a stage: Flax's partition metadata, with the model's rules."""

import contextlib
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta
from flax.linen import spmd
from jax.sharding import AbstractMesh, PartitionSpec

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.distributed.topology import FSDP, MANUAL_AXES, automatic_axes
from jaxpipe.errors import LayerError, nearest
from jaxpipe.programs.jaxpr import spec_axes

from ._marks import MarkBox, Marks
from ._tree import key_path

Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]

_PLACED = (*MANUAL_AXES, "pipe")
"""Axes over which the pipeline places weights and samples, as meshes and topologies name them."""


def checked_rules(rules: Any) -> Rules:
    """Rules from logical names to mesh axes, in Flax's format."""
    return tuple(
        (name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in rules or ()
    )


@contextlib.contextmanager
def rules_in_force(rules: Rules) -> Generator[None]:
    """Translate logical names of Flax's constraints by the rules, on the mesh around this code."""
    with nn.logical_axis_rules(rules_on(jax.sharding.get_abstract_mesh(), rules)):
        yield


def rules_on(mesh: AbstractMesh, rules: Rules) -> Rules:
    """The rules with only the mesh's automatic axes; empty if it has no automatic axes."""
    # `stage` and `data` count as None, because the pipeline itself places weights and samples
    # there.
    automatic = automatic_axes(mesh)
    if not automatic:
        return ()

    def automatic_of(axes: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if isinstance(axes, tuple):
            return tuple(axis for axis in axes if axis in automatic) or None
        return axes if axes in automatic else None

    return tuple((name, automatic_of(axes)) for name, axes in rules)


def unused_rules(
    mesh: AbstractMesh, rules: Rules, names: set[str], axes: set[str]
) -> dict[str, str | None]:
    """Rules that no layer uses, each with the weight name that it may be meant for."""
    # `names` are those in the metadata of weights, `axes` those that constraints in layers name.
    axes_of: dict[str, set[str]] = {}
    for name, to in rules_on(mesh, rules):
        axes_of.setdefault(name, set()).update(spec_axes(to))
    unruled = names - set(axes_of) - set(mesh.axis_names)
    meant = {
        name: nearest(name, unruled, 0.65)
        for name, to in axes_of.items()
        if to and name not in names
    }
    # A program does not show the names in a constraint, only the axes that they were translated to.
    # A rule therefore counts as used if a constraint names one of its axes, unless a weight has a
    # similar name that no rule covers.
    return {
        name: near for name, near in meant.items() if near is not None or not axes & axes_of[name]
    }


def metadata_names(tree: PyTree) -> set[str]:
    """The names in the partition metadata of variables."""
    specs = (leaf.get_partition_spec() for _, leaf in _partitions(tree))
    return {name for spec in specs for entry in spec for name in spec_axes(entry)}


def check_rules(mesh: AbstractMesh, rules: Rules) -> None:
    """Refuse rules that name axes the mesh does not have, if it has automatic axes."""
    for name, axes in rules if automatic_axes(mesh) else ():
        for axis in spec_axes(axes):
            if axis not in mesh.axis_names and axis not in _PLACED:
                raise LayerError(
                    f"sharding_rules must map to axes of the mesh, but got {(name, axes)!r} for a "
                    f"mesh with the axes {_listed(mesh.axis_names)}. Name {axis!r} in the "
                    f"topology, or map {name!r} to None."
                )


def unbox(tree: PyTree) -> PyTree:
    """A tree of variables without Flax's partition metadata and other marks."""
    # Boxes may be nested: a mark of `load_bias` in or around one of partition metadata.
    return jax.tree.map(lambda leaf: [leaf, *_contents(leaf)][-1], tree, is_leaf=_is_box)


def find_marks(tree: PyTree) -> Marks:
    """The marks of parameters."""
    return {path: box.mark for path, box in _boxes(tree) if isinstance(box, MarkBox)}


def stage_dims(label: str, tree: PyTree) -> Mapping[Path, int]:
    """Variables that a pipeline splits over its stages by their metadata, with the dim."""
    found = {}
    for path, leaf in _partitions(tree):
        dims = [
            dim
            for dim, names in enumerate(leaf.get_partition_spec())
            if "stage" in spec_axes(names)
        ]
        if len(dims) > 1:
            raise _twice(label, path, "stage", leaf)
        if dims:
            found[path] = dims[0]
    return found


def partition_specs(
    label: str, tree: PyTree, mesh: AbstractMesh, rules: Rules
) -> Mapping[Path, PartitionSpec]:
    """Shardings of variables over the mesh's automatic axes, by Flax's partition metadata.

    Variables that are not sharded are left out; other specs have an entry for each dim.
    """
    if not automatic_axes(mesh):
        return {}
    found = {}
    for path, leaf in _partitions(tree):
        spec = _resolve(label, path, leaf, mesh, rules)
        if any(names is not None for names in spec):
            found[path] = spec
            _check_divides(label, path, unbox(leaf), spec, mesh)
    return found


def paths_over_data(label: str, tree: PyTree, mesh: AbstractMesh, rules: Rules) -> list[str]:
    """Descriptions of the variables whose metadata names the axis `data` itself."""
    # Without automatic axes, metadata has no effect. A logical name that a rule maps to `data` does
    # not count, because such a rule is used for activations too.
    if not automatic_axes(mesh) or "data" in {name for name, _ in rules}:
        return []
    return [
        f"{'.'.join(path)!r} of layer {label}"
        for path, leaf in _partitions(tree)
        if not isinstance(leaf, nn.LogicallyPartitioned)
        and any("data" in spec_axes(entry) for entry in leaf.get_partition_spec())
    ]


def with_fsdp(
    params: Mapping[Path, Any],
    specs: Mapping[Path, PartitionSpec],
    taken: Mapping[Path, int],
    mesh: AbstractMesh,
) -> Mapping[Path, PartitionSpec]:
    """Shardings with weights divided over `fsdp` too, along the largest dim that it divides."""
    length = mesh.shape.get(FSDP, 0)
    found = dict(specs)
    for path, leaf in params.items() if length else ():
        spec = specs.get(path, PartitionSpec(*[None] * len(leaf.shape)))
        # Metadata that names the axis is the user's own choice of the dim.
        if len(leaf.shape) < 2 or any(FSDP in spec_axes(entry) for entry in spec):
            continue
        # Of two dims with equal shares, one that is still whole comes first, then the earlier one.
        shares: list[tuple[int, bool, int]] = []
        for dim, (size, names) in enumerate(zip(leaf.shape, spec, strict=True)):
            share = size // math.prod(mesh.shape[axis] for axis in spec_axes(names))
            # A dim that is split over the stages (`taken`) is not divided further.
            if share and share % length == 0 and taken.get(path) != dim:
                shares.append((share, names is None, -dim))
        if shares:
            dim = -max(shares)[2]
            # After the other axes of the dim, so that each device divides its existing share.
            axes = (*spec_axes(spec[dim]), FSDP)
            entry = axes if len(axes) > 1 else FSDP
            found[path] = PartitionSpec(
                *(entry if d == dim else names for d, names in enumerate(spec))
            )
    return found


def _resolve(label: str, path: Path, leaf: Any, mesh: AbstractMesh, rules: Rules) -> PartitionSpec:
    """A variable's metadata, translated to the mesh's automatic axes as Flax applies rules."""
    entries = tuple(leaf.get_partition_spec())
    ndim = len(unbox(leaf).shape)
    is_logical = isinstance(leaf, nn.LogicallyPartitioned)
    if is_logical and leaf.rules:
        rules = checked_rules(leaf.rules)
        check_rules(mesh, rules)
    rules = rules_on(mesh, rules)
    ruled = {str(name) for name, _ in rules}
    names = [name for entry in entries for name in spec_axes(entry)]
    unknown = [name for name in names if name not in (*ruled, *mesh.axis_names, *_PLACED)]
    if unknown and not is_logical:
        raise LayerError(
            f"{'.'.join(path)!r} of layer {label} must be sharded over axes of the mesh, but got "
            f"{unknown[0]!r} in its partition metadata {entries} for a mesh with the axes "
            f"{_listed(mesh.axis_names)}. Name the axis in the topology, or map the name to one: "
            f"sharding_rules=(({unknown[0]!r}, None),)."
        )
    if len(entries) > ndim:
        raise LayerError(
            f"{'.'.join(path)!r} of layer {label} must have a name for each of its {ndim} dims in "
            f"its partition metadata, but got {entries}. Leave out the surplus names."
        )
    if len(set(names)) < len(names):
        raise _twice(label, path, next(name for name in names if names.count(name) > 1), leaf)
    # Without a rule, the name of a mesh axis is that axis, and any other logical name is None.
    every_rule = (*rules, *((name, name) for name in automatic_axes(mesh) if name not in ruled))
    alone = spmd.logical_to_mesh(
        PartitionSpec(*(x if isinstance(x, str) else None for x in entries)), every_rule
    )
    spec: list[Any] = [None] * ndim
    for dim, (entry, axes) in enumerate(zip(entries, map(spec_axes, alone), strict=True)):
        if isinstance(entry, tuple):
            axes = tuple(
                a
                for name in entry
                for a in spec_axes(spmd.logical_to_mesh(PartitionSpec(name), every_rule)[0])
            )
        spec[dim] = axes if len(axes) > 1 else axes[0] if axes else None
    used = [axis for axes in spec for axis in spec_axes(axes)]
    if len(set(used)) < len(used):
        raise _twice(label, path, next(axis for axis in used if used.count(axis) > 1), leaf)
    return PartitionSpec(*spec)


def _check_divides(
    label: str, path: Path, leaf: Any, spec: PartitionSpec, mesh: AbstractMesh
) -> None:
    for dim, names in enumerate(spec):
        lengths = {axis: mesh.shape[axis] for axis in spec_axes(names)}
        size = leaf.shape[dim]
        length = math.prod(lengths.values())
        if size % length:
            axes = " x ".join(f"{axis}={each}" for axis, each in lengths.items())
            below = size // length * length
            above = -(-size // length) * length
            nearest = f"{below} or {above}" if below else f"{above}"
            raise LayerError(
                f"{'.'.join(path)!r} of layer {label} must be sharded along dims that the mesh "
                f"divides, but got size {size} at dim {dim} over {axes}. Make it {nearest}, or "
                "leave the axis out of its partition metadata or of sharding_rules."
            )


def _twice(label: str, path: Path, name: str, leaf: Any) -> LayerError:
    return LayerError(
        f"{'.'.join(path)!r} of layer {label} must be sharded over an axis along one dim, but got "
        f"{name!r} at two in its partition metadata {tuple(leaf.get_partition_spec())}. Leave "
        f"{name!r} at one dim."
    )


def _partitions(tree: PyTree) -> Iterator[tuple[Path, Any]]:
    return ((path, box) for path, box in _boxes(tree) if hasattr(box, "get_partition_spec"))


def _boxes(tree: PyTree) -> Iterator[tuple[Path, Any]]:
    for keys, leaf in jax.tree.leaves_with_path(tree, is_leaf=_is_box):
        yield from ((key_path(keys), box) for box in [leaf, *_contents(leaf)] if _is_box(box))


def _contents(box: Any) -> Iterator[Any]:
    """Yield what is in a box: other boxes, each inside the one before, and at last the value."""
    while _is_box(box):
        box = box.unbox(False) if isinstance(box, meta.Partitioned) else box.unbox()
        yield box


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, meta.AxisMetadata)


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names))
