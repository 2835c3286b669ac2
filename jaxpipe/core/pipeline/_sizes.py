"""Bytes that a pipeline takes on each device beside its state."""

from dataclasses import dataclass

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.core.executor import Stage
from jaxpipe.core.state import Layout, layout_of
from jaxpipe.distributed.topology import FSDP
from jaxpipe.layers import device_bytes


@dataclass(frozen=True)
class Sizes:
    """Bytes on each device, counted from shapes and shardings."""

    stage: Stage
    mesh: Mesh

    @property
    def residual_bytes(self) -> tuple[int, int]:
        """Bytes per device for the residuals of one microbatch and one chunk.

        The first number counts bytes on the device, the second bytes in host memory. If residuals
        are sharded inside a stage, the numbers are upper bounds, because XLA may also divide
        residuals without annotations.
        """
        sizes = [0, 0]
        stage = self.stage
        off_trunk = [P() for _ in jax.tree.leaves(stage.prologue.residuals)]
        leaves = map(jax.tree.leaves, (stage.residuals, stage.is_hosted))
        for leaf, is_hosted, spec in zip(
            *leaves, [*off_trunk, *stage.trunk.residual_specs], strict=True
        ):
            sizes[is_hosted] += device_bytes(leaf, self.mesh, spec)
        return sizes[0], sizes[1]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of its stage's weights that a device gathers over `fsdp`, in the compute dtype."""
        return self._bytes_beside(self.stage.params.gathered, self.stage.params.at_rest)

    @property
    def whole_sums_bytes(self) -> int:
        """Additional bytes per device if gradient sums were not divided over `fsdp`."""
        params = self.stage.params
        whole = layout_of(params.table, lambda row: row.summed, whole_along=FSDP, trained=True)
        return self._bytes_beside(whole, params.grad_layout)

    def _bytes_beside(self, whole: Layout, divided: Layout) -> int:
        """Return the additional bytes per device of the layout `whole` over `divided`."""
        more, less = (device_bytes(x.struct(), self.mesh, x.spec()) for x in (whole, divided))
        return more - less
