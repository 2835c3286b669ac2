"""`Lockstep`: either all processes take the next batch, or none does."""

import json
import zlib
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

from jaxpipe.data import Batch, Shard
from jaxpipe.distributed import (
    check_equal,
    checksum,
    failure_of,
    gather_numbers,
    gather_texts,
    listed,
    raise_on_all,
)
from jaxpipe.errors import ConfigError, DataError
from jaxpipe.layers import format_struct, struct_of

T = TypeVar("T")

_ADVICE = (
    "Give each process the samples of its own replicas and the same number of batches, as "
    "jaxpipe.data.BatchLoader with shard=jaxpipe.data.process_shard(mesh) does."
)


class Lockstep:
    """Makes all processes take the next batch, or none of them.

    Before they start anything in which all must take part, processes compare whether they have a
    batch, its shapes and the call. They also compare a checksum, because processes that contain
    parts of one replica must supply the same samples, and the settings that the user has changed
    since the engine was made.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        # Values set by calls, by name.
        self.settings: dict[str, str] = {}
        self._is_alone = False
        """True once it is known that no other process supplies the same shard."""

    def take(
        self, call: str, read: Callable[[], tuple[T, Batch]], *, is_whole: bool = False
    ) -> tuple[T, Batch]:
        """Take a batch for `call` and return the result of `read`. All processes must call it."""
        if jax.process_count() == 1:
            return read()
        found: tuple[T, Batch] | None = None
        error = None
        failure = ""
        end = None
        try:
            found = read()
        except StopIteration as caught:
            end = caught
        except Exception as caught:  # noqa: BLE001  # raised again below, when all processes know
            error = caught
            failure = failure_of(caught)
        form = "" if found is None else f"{call} of {format_struct(struct_of(found[1]))}"
        # With `is_whole`, each process passes the batch of all replicas.
        shard = 0 if is_whole else self._shard.index
        content = 0 if found is None or (self._is_alone and not is_whole) else _checksum(found[1])
        # One exchange for all questions, because every step waits for it. Text is exchanged only if
        # something is wrong.
        settings = zlib.crc32(json.dumps(self.settings, sort_keys=True).encode())
        gathered = gather_numbers(
            [bool(failure), end is not None, zlib.crc32(form.encode()), content, shard, settings]
        )
        if gathered[:, 0].any():
            # The other processes raise an error of the same kind.
            raise_on_all(error, gather_texts(failure))
        if len(set(gathered[:, 5].tolist())) > 1:
            repair = (
                "Make the same calls of set_lr, set_hyperparams and set_train_batch_size in all "
                "processes."
            )
            check_equal(lambda: {"settings": self.settings}, ConfigError, repair)
        if end is not None and gathered[:, 1].all():
            raise end
        _check_batches(
            gathered, form, "Give all processes the same samples." if is_whole else _ADVICE
        )
        if not is_whole:
            self._is_alone = np.count_nonzero(gathered[:, 4] == shard) == 1
        if found is None:
            raise StopIteration
        return found


def _check_batches(gathered: np.ndarray, form: str, repair: str) -> None:
    """Raise DataError if the batches of all processes do not match."""
    if gathered[:, 1].any():
        raise DataError(
            "the data of all processes must end after the same batch, but got the end in "
            f"{_listed(gathered[:, 1])} and another batch in {_listed(gathered[:, 1] == 0)}. "
            f"{repair}"
        )
    if len(set(gathered[:, 2].tolist())) > 1:
        forms = "; ".join(f"process {i}: {text}" for i, text in enumerate(gather_texts(form)))
        raise DataError(
            f"the batches of all processes must have one form, but got {forms}. {repair}"
        )
    for shard in sorted(set(gathered[:, 4].tolist())):
        if len(set(gathered[gathered[:, 4] == shard, 3].tolist())) > 1:
            raise DataError(
                "processes that hold parts of the same replicas must feed the same samples, but "
                f"got different ones in {_listed(gathered[:, 4] == shard)}, all of shard {shard}. "
                f"{repair}"
            )


def _checksum(batch: Batch) -> int:
    return zlib.crc32(np.array([checksum(leaf) for leaf in jax.tree.leaves(batch)], np.uint32).data)


def _listed(chosen: np.ndarray) -> str:
    return listed(np.flatnonzero(chosen).tolist())
