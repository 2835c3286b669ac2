"""`Lockstep`: all processes take the next batch, or none."""

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from jaxpipe.data import Batch, Shard
from jaxpipe.distributed import gather_numbers, gather_texts, raise_on_all
from jaxpipe.errors import DataError
from jaxpipe.layers import format_struct, struct_of

T = TypeVar("T")

_ADVICE = (
    "Give each process the samples of its own replicas and equally many batches, as jaxpipe.data.BatchLoader with "
    "shard=jaxpipe.data.process_shard(mesh) does."
)


class Lockstep:
    """Lets all processes take the next batch, or none.

    Processes exchange whether they have a batch and of what form before anything starts that all must take part in;
    the first time also a checksum, since processes that hold parts of one replica must feed the same samples.

    Args:
        shard: The samples that this process feeds.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._is_checked = False

    def take(self, read: Callable[[], tuple[T, Batch]]) -> tuple[T, Batch]:
        """Take a batch.

        Args:
            read: Returns something made for this process's part of the batch, and the part.

        Returns:
            What `read` returned.

        Raises:
            StopIteration: The data of all processes ended.
            DataError: They ended on some only, or their batches do not go together.
            Exception: What `read` raised; where it raised on another process the same kind of error.
        """
        if jax.process_count() == 1:
            return read()
        found: tuple[T, Batch] | None = None
        error, failure, end = None, "", None
        try:
            found = read()
        except StopIteration as caught:
            end = caught
        except Exception as caught:  # noqa: BLE001  # raised again below, when all processes know
            error, failure = caught, f"{type(caught).__name__}\n{caught}"
        form = "" if found is None else format_struct(struct_of(found[1]))
        # Once: hashing every byte of every batch would cost more than it finds.
        content = 0 if found is None or self._is_checked else _checksum(found[1])
        # One exchange for all questions, since every step waits for it; texts follow only where something is wrong.
        gathered = gather_numbers(
            [bool(failure), end is not None, zlib.crc32(form.encode()), content, self._shard.index]
        )
        if gathered[:, 0].any():
            raise_on_all(error, gather_texts(failure))
        if end is not None and gathered[:, 1].all():
            raise end
        if gathered[:, 1].any():
            raise DataError(
                f"the data of all processes must end after the same batch, but got the end in process "
                f"{_listed(gathered[:, 1])} and another batch in process {_listed(gathered[:, 1] == 0)}. {_ADVICE}"
            )
        if len(set(gathered[:, 2].tolist())) > 1:
            forms = "; ".join(f"process {i}: {text}" for i, text in enumerate(gather_texts(form)))
            raise DataError(f"the batches of all processes must have one form, but got {forms}. {_ADVICE}")
        self._check_content(gathered[:, 3], gathered[:, 4])
        if found is None:
            raise StopIteration
        return found

    def _check_content(self, contents: np.ndarray, shards: np.ndarray) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        for shard in sorted(set(shards.tolist())):
            if len(set(contents[shards == shard].tolist())) > 1:
                raise DataError(
                    f"processes that hold parts of the same replicas must feed the same samples, but got other ones in "
                    f"process {_listed(shards == shard)}, all of shard {shard}. {_ADVICE}"
                )


def _checksum(batch: Any) -> int:
    checksum = 0
    for leaf in jax.tree.leaves(batch):
        checksum = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, checksum)
    return checksum


def _listed(chosen: np.ndarray) -> str:
    return ", ".join(str(process) for process in np.flatnonzero(chosen))
