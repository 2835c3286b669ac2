"""Saving and opening: with other stages, training goes on as it would have."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.typing import PyTree
from jaxpipe.checkpoint import export_safetensors, load_params
from jaxpipe.engine import PipelineEngine
from jaxpipe.layers import flatten_dict
from jaxpipe.programs.jaxpr import arithmetic_of
from jaxpipe.weights import load_safetensors

from ._claims import NotCovered
from ._job import OWN, Job
from ._narrow import fewer_stages
from ._proof import Finding
from ._trained import entries, made_engine

_DEVIATIONS = 8.0


def state_findings(job: Job, saved: PipelineEngine) -> Iterator[Any]:
    """Save an engine after two steps, export, open at other numbers of stages, and compare.

    `saved` has made the first step.
    """
    with tempfile.TemporaryDirectory(prefix="jaxpipe-prove-") as folder:
        saved.train_batch(entries(job.batch_in(OWN, 1)))
        saved.save_checkpoint(Path(folder))
        wanted = _everything(saved)
        exported = Path(folder) / "exported.safetensors"
        export_safetensors(Path(folder), exported)
        trees = (load_params(Path(folder)), load_safetensors(exported))
        held, again = (_flat("params", tree) for tree in trees)
        yield from _unlike("export_safetensors", held, again)
        next_loss = float(saved.train_batch(entries(job.batch_in(OWN, 2))))
        unit = arithmetic_of(list(job.pipeline(OWN).trace.programs))
        # Other numbers of stages are other programs, so that roundings in all layers may move a
        # loss.
        allowed = _DEVIATIONS * unit.unit * np.sqrt(unit.operations * len(job.module.layers))
        others = _other_stages(job)
        if not others:
            yield NotCovered("no other number of stages fits the layers and the devices")
        for stages in others:
            engine = made_engine(job, stages, OWN)
            engine.load_checkpoint(Path(folder))
            where = f"checkpoint of {job.module.num_stages} stages, opened with {stages}"
            yield from _unlike(where, wanted, _everything(engine))
            loss = float(engine.train_batch(entries(job.batch_in(OWN, 2))))
            # Not `>`, which is false of NaN.
            if not abs(loss - next_loss) <= allowed * max(abs(next_loss), 1.0):
                yield Finding(where, f"the next loss is {loss!r}, and was {next_loss!r}.")
        yield {"opened with stages": others, "arrays": len(wanted)}


def _other_stages(job: Job) -> list[int]:
    """Return one, and twice or half the job's number of stages, if layers and devices suffice."""
    own = job.module.num_stages
    room = jax.device_count() * own // job.mesh.size
    # Every chunk of a stage needs a layer.
    chunks = (len(job.pipeline(OWN).plan.parts) - 1) // own
    most = min(len(job.module.layers) // chunks, room)
    fewer = fewer_stages(own)
    return [*fewer[:1], 2 * own] if 2 * own <= most else fewer


def _unlike(where: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Finding]:
    """Find arrays that are not the same bits in both."""
    for name in dict.fromkeys((*wanted, *found)):
        is_in_both = name in wanted and name in found
        if not is_in_both or not _is_same(wanted[name], found[name]):
            yield Finding(where, f"{name} is not what was saved.")


def _is_same(a: Any, b: Any) -> bool:
    is_float = jnp.issubdtype(np.asarray(a).dtype, jnp.inexact)
    return np.array_equal(a, b, equal_nan=is_float)


def _flat(kind: str, tree: PyTree) -> dict[str, Any]:
    return {"/".join((kind, *path)): x for path, x in flatten_dict(tree).items()}


def _everything(engine: Any) -> dict[str, Any]:
    found = _flat("params", engine.module_state_dict())
    found |= _flat("collections", engine.module_collections())
    leaves = jax.tree_util.tree_leaves_with_path(engine.opt_state_tree())
    found |= {f"opt_state{jax.tree_util.keystr(path)}": _numbers(x) for path, x in leaves}
    return found


def _numbers(x: PyTree) -> Any:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)
