"""Batches of a pipeline: their shapes, their check, and their way to the devices."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree
from jaxpipe.core.executor import batch_shard_dims, batch_spec
from jaxpipe.core.planner import Job
from jaxpipe.core.state import place_samples
from jaxpipe.data import Batch, split_entry
from jaxpipe.distributed.topology import FSDP
from jaxpipe.layers import struct_of

from ._validate import check_batch

BatchLike = Sequence[PyTree]  # a `Batch`, or a tuple (inputs, labels) or (inputs, labels, side)

OVER_DATA = P(None, "data")
"""The spec of `[num_microbatches, microbatch_size * replicas, ...]` over the manual axes."""


class BatchIO:
    """Shapes, check and placement of a pipeline's batches.

    Attributes:
        num_microbatches: Number of microbatches of a batch.
        microbatch_size: Samples per microbatch on one replica.
        num_replicas: Number of replicas: the size of `data`, times that of `fsdp`.
        microbatch: Shapes and dtypes of a microbatch as layers see it, for one index along
            `data`: leaves `[microbatch_size * (size of fsdp), ...]`.
        shard_dims: The dim along which each leaf of a microbatch is sharded over the stages.
        specs: The sharding of each leaf of a batch over the manual axes.
        samples_sharding: The sharding of leaves that are not sharded over the stages.
        struct: Shapes, dtypes and shardings of a batch.
    """

    def __init__(self, traced: Job, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.microbatch_size = traced.microbatch_size
        self.num_replicas = traced.num_replicas
        self.microbatch = traced.microbatch
        self.shard_dims = batch_shard_dims(
            self.microbatch, num_microbatches, traced.module.num_stages
        )
        self.specs: Batch = jax.tree.map(batch_spec, self.shard_dims)
        mesh = traced.mesh
        # Samples are also divided over `fsdp`, which is no manual axis.
        of_samples = P(None, ("data", FSDP)) if FSDP in mesh.axis_names else OVER_DATA
        self.samples_sharding = NamedSharding(mesh, of_samples)

        def sharded(x: Any, spec: P) -> Any:
            is_whole = spec == OVER_DATA
            sharding = self.samples_sharding if is_whole else NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct((num_microbatches, *x.shape), x.dtype, sharding=sharding)

        self.struct: Batch = jax.tree.map(sharded, traced.entry, self.specs)

    @property
    def shardings(self) -> Any:
        """The shardings of a batch, as `jax.jit` takes them."""
        if all(spec == OVER_DATA for spec in jax.tree.leaves(self.specs)):
            # One sharding for all leaves, so that a batch of another structure raises the error of
            # `check` and not one of jit.
            return self.samples_sharding
        return jax.tree.map(lambda x: x.sharding, self.struct)

    def check(self, batch: BatchLike) -> None:
        """Check a batch against the example that the pipeline was built from.

        Raises:
            DataError: The structure, shapes or dtypes differ. The message names the leaf.
        """
        whole = struct_of(split_entry(batch, "the batch"))
        check_batch(whole, self.struct, self.microbatch_size, self.num_replicas)

    def place(self, batch: BatchLike, replicas: range | None = None) -> Batch:
        """Put a batch on the devices.

        Args:
            batch: The batch. With `replicas`, only the samples that this process supplies.
            replicas: The replicas of these samples, as in `jaxpipe.data.process_shard`. None: all
                replicas.

        Returns:
            The batch as global arrays.

        Raises:
            DataError: The structure, shapes or dtypes differ from those of the example.
        """
        batch = split_entry(batch, "the batch")
        replicas = range(self.num_replicas) if replicas is None else replicas
        # Samples of some replicas are checked as if they were the whole batch, so that one check
        # and its errors cover both cases.
        whole = struct_of(batch)
        if len(replicas) != self.num_replicas:
            whole = jax.tree.map(lambda x: _scaled(x, self.num_replicas, len(replicas)), whole)
        check_batch(whole, self.struct, self.microbatch_size, self.num_replicas)
        return jax.tree.map(
            lambda x, like: place_samples(x, like, replicas, self.num_replicas),
            batch,
            self.struct,
        )


def _scaled(x: Any, num_replicas: int, num_given: int) -> Any:
    """Return the shape of a whole batch, given that for some replicas; as it is if uneven."""
    size, rest = divmod(x.shape[1] * num_replicas, num_given) if len(x.shape) > 1 else (0, 1)
    return x if rest else jax.ShapeDtypeStruct((x.shape[0], size, *x.shape[2:]), x.dtype)
