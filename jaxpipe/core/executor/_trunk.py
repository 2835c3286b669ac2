"""The trunk: the same layers in every virtual stage, run as one program without a conditional."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import Storage

from ._arrays import ByName, Prepared, Residuals, TrunkSums
from ._batch import Context
from ._blueprint import Blueprint
from ._buffers import select
from ._reported import ReportedValues
from ._results import BackwardResult, ForwardResult
from ._segment import Segment
from ._segment_program import SegmentProgram
from ._virtual_stage import VirtualStage


class Trunk:
    """Forward and backward of the layers that are the same in all virtual stages.

    A chunk is a number if the program is compiled for that chunk only. Otherwise it is an array,
    and each action takes the chunk's parameters out of those of all chunks, which copies them.

    With `scan`, equal layers run as one `lax.scan`, so that the program's size does not grow with
    their number. Their parameters are then stacked once per step. Layers that differ from one
    another, keep collections or report values are never scanned. `join` stacks the parameters of
    all chunks, for chunks that are arrays.

    Attributes:
        struct: Shapes and dtypes of one chunk's prepared parameters.
        sums: Shapes and dtypes of the summed gradients; None for frozen parameters.
        specs: Shardings of the parameters' gradients over automatic axes.
        residuals: Shapes and dtypes of the residuals from `forward` to `backward`.
        is_hosted: Whether each residual is stored in host memory.
        pending: Shapes and dtypes of the values that a split backward keeps for its weight
            gradient.
    """

    def __init__(self, blueprint: Blueprint, *, scan: bool, join: bool, split: bool) -> None:
        trunks = [cut.trunk for cut in blueprint.cuts]
        self.aux = [ReportedValues(blueprint.module.layers, blueprint.trace, x) for x in trunks]
        self.is_empty = not trunks[0]
        # A scan stacks the results of its body, so its layers' collections and reports would need
        # separate names.
        is_plain = not (self.aux[0].names or blueprint.collections.has_any(trunks[0]))
        are_alike = len(trunks[0]) > 1 and len({blueprint.signatures[i] for i in trunks[0]}) == 1
        # Scanned layers share the arrays of their sums.
        are_alike = are_alike and len({blueprint.params.frozen_in(0, i) for i in trunks[0]}) == 1
        # All trunks are the same program, which is built once from the layers of the first virtual
        # stage. The others differ only in their parameters and in the layer indices that are folded
        # into random keys.
        self._program = SegmentProgram(
            blueprint, 0, trunks, scan=scan and are_alike and is_plain, split=split
        )
        for v, layers in enumerate(trunks):
            self._program.serve(v, layers)
        self._segment = segment = self._program.segment
        self._chunks = [
            Segment(blueprint, segment.stage, trunks[v])
            for v in blueprint.placement.virtual[segment.stage]
        ]
        self._join = join and len(self._chunks) > 1
        self.struct = segment.struct
        self.sums = segment.sums
        self.specs = segment.specs
        # Without a trunk, activations pass through in their common form.
        self.residuals = [] if self.is_empty else self._program.residuals.structs
        self.is_hosted = [] if self.is_empty else self._program.residuals.is_hosted
        self.pending = [] if self.is_empty else self._program.pending

    @property
    def residual_specs(self) -> list[P]:
        """Shardings of the residuals over automatic axes, as far as they are known."""
        return [] if self.is_empty else self._program.residual_specs

    def prepare(self, stacked: ByName) -> Prepared:
        """Convert the trunk's parameters for its actions: a tree per chunk, or chunks stacked."""
        each = [
            self._segment.prepare(
                dict(zip(self._segment.names, (stacked[name] for name in chunk.names), strict=True))
            )
            for chunk in self._chunks
        ]
        # Once a step, outside the loop: inside, XLA would stack them again in every tick.
        return jax.tree.map(lambda *xs: jnp.stack(xs), *each) if self._join else each

    def named(self, grads: TrunkSums) -> ByName:
        """Convert gradients from one tree per chunk to gradients by name."""
        found: ByName = {}
        for chunk, tree in zip(self._chunks, grads, strict=True):
            of_chunk = self._segment.by_name(tree)
            pairs = zip(chunk.names, self._segment.names, strict=True)
            found |= {
                name: of_chunk[common]
                for name, common in pairs
                if common not in self._segment.frozen
            }
        return found

    def forward(
        self,
        at: VirtualStage,
        params: Prepared,
        collections: Storage,
        inputs: PyTree,
        context: Context,
    ) -> ForwardResult:
        """Run the forward in training, with prepared `params` and the stage's collections."""
        if self.is_empty:
            return ForwardResult(inputs, [], collections, jnp.zeros((0,), jnp.float32))
        full_context = (self._program.offset(at), *context, self._collections_of(at, collections))
        result = self._program.forward(self._take(at, params), inputs, full_context)
        return result._replace(collections=self._put(at, collections, result.collections))

    def backward(
        self,
        at: VirtualStage,
        params: Prepared,
        residuals: Residuals,
        gradient: list[jax.Array],
        reported_cotangent: jax.Array,
        *,
        split: bool,
    ) -> BackwardResult:
        """Run the backward, from a gradient for each differentiable leaf of the output."""
        if self.is_empty:
            return BackwardResult({}, gradient, [])
        return self._program.backward(
            self._take(at, params), residuals, gradient, reported_cotangent, split=split
        )

    def backward_weight(
        self, at: VirtualStage, params: Prepared, residuals: Residuals, pending: list[jax.Array]
    ) -> Prepared:
        """Compute the gradients that a split backward left; the others are None."""
        return (
            {}
            if self.is_empty
            else self._program.backward_weight(self._take(at, params), residuals, pending)
        )

    def evaluate(
        self,
        at: VirtualStage,
        params: Prepared,
        collections: Storage,
        inputs: PyTree,
        context: Context,
    ) -> PyTree:
        """Run the forward outside training."""
        if self.is_empty:
            return inputs
        full_context = (self._program.offset(at), *context, self._collections_of(at, collections))
        return self._program.run(self._take(at, params), inputs, full_context, train=False)[0]

    def _take(self, at: VirtualStage, params: Prepared) -> Prepared:
        if not self._join:
            return self._segment.gather(params[at.chunk])
        # This copies the chunk's parameters in every tick. A switch on the chunk would instead
        # prevent overlap on GPU.
        of_chunk = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, at.chunk, keepdims=False), params
        )
        return self._segment.gather(of_chunk)

    def _collections_of(self, at: VirtualStage, collections: Storage) -> list[PyTree]:
        each = [chunk.collections(collections) for chunk in self._chunks]
        if isinstance(at.chunk, int):
            return each[at.chunk]
        return jax.tree.map(lambda *xs: jnp.stack(xs)[at.chunk], *each)

    def _put(self, at: VirtualStage, collections: Storage, new: list[PyTree]) -> Storage:
        if isinstance(at.chunk, int):
            return self._chunks[at.chunk].put(collections, new)
        for number, chunk in enumerate(self._chunks):
            old = chunk.collections(collections)
            collections = chunk.put(collections, select(at.chunk == number, new, old))
        return collections
