"""Verification of a checkpoint against the hashes of what was written."""

import contextlib
from dataclasses import dataclass
from os import PathLike

from jaxpipe._util.stores import AnyPath, StorePath
from jaxpipe.errors import CheckpointError

from ._open import Checkpoint, open_checkpoint, reread
from ._store import is_damaged, read_arrays

_SHOWN = 12


@dataclass(frozen=True)
class Verification:
    """Outcome of reading a whole checkpoint and comparing it with its hashes.

    Attributes:
        path: The checkpoint's folder.
        tag: Its name.
        num_arrays: Number of global arrays.
        num_rows: Total number of their rows.
        num_bytes: Total size of the arrays.
    """

    path: AnyPath
    tag: str
    num_arrays: int
    num_rows: int
    num_bytes: int


def verify_checkpoint(
    path: str | PathLike[str] | StorePath, tag: str | None = None
) -> Verification:
    """Read a whole checkpoint and compare it with the hashes of what was written.

    Call this from one process.

    Args:
        path: The directory that was passed to `save_checkpoint`, or a checkpoint's own folder.
        tag: Name of the checkpoint. None selects the latest.

    Returns:
        The amount of data that was read and verified.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged. The error names all damaged
            arrays.
    """
    return reread(path, lambda: _verify(open_checkpoint(path, tag)))


def _verify(checkpoint: Checkpoint) -> Verification:
    arrays = checkpoint.index.arrays
    damaged, cause = _damaged(checkpoint)
    if damaged:
        listed = [f"{name} ({what})" for name, what in damaged.items()]
        more = f", and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
        reason = f" Reading failed with {cause}." if cause else ""
        raise CheckpointError(
            f"{checkpoint.path} must hold its {len(arrays)} arrays as they were written, but got "
            f"{len(listed)} damaged: {', '.join(listed[:_SHOWN])}{more}.{reason} Load another tag, "
            "or restore the files."
        )
    return Verification(
        path=checkpoint.path,
        tag=checkpoint.tag,
        num_arrays=len(arrays),
        num_rows=sum(array.shape[0] for array in arrays.values()),
        num_bytes=sum(array.num_bytes for array in arrays.values()),
    )


def _damaged(checkpoint: Checkpoint) -> tuple[dict[str, str], str]:
    """Return the damage by array name, and the reason why the first array could not be read."""
    stored = checkpoint.index.arrays
    with contextlib.suppress(CheckpointError):
        for _ in read_arrays(
            checkpoint.arrays,
            stored,
            {name: range(array.shape[0]) for name, array in stored.items()},
        ):
            pass
        return {}, ""
    # Something is damaged. Reading each array separately keeps one failure from hiding others.
    found: dict[str, str] = {}
    cause = ""
    for name, stored in checkpoint.index.arrays.items():
        try:
            array = next(read_arrays(checkpoint.arrays, checkpoint.index.arrays, {name: ()}))[name]
        except CheckpointError as error:
            found[name] = "unreadable"
            cause = cause or _first_line(error.__cause__)
            continue
        rows = [str(row) for row in range(stored.shape[0]) if is_damaged(stored, array, row)]
        if rows:
            more = ", ..." if len(rows) > _SHOWN else ""
            found[name] = f"row{'s' if len(rows) > 1 else ''} {', '.join(rows[:_SHOWN])}{more}"
    return found, cause


def _first_line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
