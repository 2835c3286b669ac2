"""Lookup of checkpoints in a directory."""

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import TypeVar

from jaxpipe._util.paths import any_path
from jaxpipe._util.stores import AnyPath, StorePath
from jaxpipe._util.warn import warn
from jaxpipe.errors import CheckpointError

from ._directory import (
    ARRAYS,
    LATEST,
    Commit,
    check_tag,
    in_order,
    read_commit,
    read_latest,
    sound_tags,
)
from ._index import INDEX, Index, read_index

_READINGS = 20

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint on disk.

    Attributes:
        path: Its folder.
        tag: Its name.
        commit: Its commit.
        index: The index of its contents.
    """

    path: AnyPath
    tag: str
    commit: Commit
    index: Index

    @property
    def arrays(self) -> AnyPath:
        """The folder of its arrays."""
        return self.path / self.commit.data / ARRAYS


def find_checkpoint(
    load_dir: str | PathLike[str] | StorePath, tag: str | None = None
) -> Checkpoint | None:
    """Open a checkpoint, if there is one.

    Args:
        load_dir: The directory that was passed to `save_checkpoint`. Without a tag, it may also be
            a checkpoint's own folder.
        tag: Name of the checkpoint. None selects the last one that was committed with
            `save_latest`.

    Returns:
        The checkpoint, or None if the directory contains no checkpoint.

    Raises:
        CheckpointError: There is no checkpoint with that tag, `latest` names a checkpoint that does
            not exist and none can be loaded instead, or the checkpoint is damaged.
    """
    folder = any_path(load_dir, "load_dir")
    if tag is not None:
        return open_folder(folder / check_tag(tag), folder)
    if read_commit(folder) is not None:
        return open_folder(folder, folder.parent)
    newest = _newest(folder)
    return None if newest is None else open_folder(folder / newest, folder)


def _newest(folder: AnyPath) -> str | None:
    """Return the tag to load; warn if `latest` names another, or if others are damaged."""
    commits, damaged = sound_tags(folder)
    try:
        named = read_latest(folder)
    except CheckpointError as error:
        named = None
        damaged[LATEST] = error
    if named is not None and named not in {*commits, *damaged}:
        there = read_commit(folder / named)  # a store's listing may be out of date
        commits = in_order({**commits, named: there}) if there else commits
    found = [tag for tag in commits if commits[tag].is_latest]
    if damaged and (named in damaged or not found):
        raise damaged.get(named or "", next(iter(damaged.values())))
    if not found and named is not None and named not in commits:
        raise CheckpointError(
            f"{folder / LATEST} must name a checkpoint that is there, but got {named!r} and "
            f"{_listed(commits)}. Load one of them by its tag, or remove the file."
        )
    if not found:
        return None
    for error in damaged.values():
        warn(f"Passed over: {error}")
    if named is not None and named != found[-1]:
        other = (
            f"was committed after it and is loaded. To go back, load tag={named!r}."
            if named in commits
            else "is the newest checkpoint that is there, and is loaded."
        )
        warn(f"{folder / LATEST} names {named!r}, but {found[-1]!r} {other}")
    return found[-1]


def open_checkpoint(path: str | PathLike[str] | StorePath, tag: str | None = None) -> Checkpoint:
    """Open a checkpoint that must exist.

    Args:
        path: As for `find_checkpoint`.
        tag: As for `find_checkpoint`.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    folder = any_path(path, "path")
    found = find_checkpoint(folder, tag)
    if found is None:
        raise CheckpointError(
            f"path must be a checkpoint, or a directory with one, but got path={str(path)!r} and "
            f"{_listed(sound_tags(folder)[0])}. Pass the directory that was passed to "
            "save_checkpoint, or a tag in it."
        )
    return found


def reread(
    path: str | PathLike[str] | StorePath,
    read: Callable[[], T],
    agreed: Callable[[bool], bool] = bool,
) -> T:
    """Read the checkpoint at `path`; retry if another job replaced or removed it meanwhile.

    `agreed` is given whether this process sees that the directory has changed, and returns whether
    any process does. An error of `read` is raised if it has not, or in the last attempt.
    """
    folder = any_path(path, "path")
    num_readings = 0
    while True:
        before = _commits(folder)
        num_readings += 1
        try:
            return read()
        except CheckpointError as error:
            # Either all processes retry or none does, because reading exchanges messages.
            after = _commits(folder)
            if not agreed(before is not None and after is not None and after != before):
                raise
            if num_readings == _READINGS:
                raise CheckpointError(
                    f"checkpoints must stay while they are read, but got path={str(path)!r}, where "
                    f"they were replaced in each of {_READINGS} attempts; the last error: {error} "
                    "Save less often, or keep more with checkpoint.keep_last."
                ) from error


def _commits(folder: AnyPath) -> dict[str, Commit | None] | None:
    """Return the commits in a directory, or in one checkpoint's folder; None if storage fails."""
    found: dict[str, Commit | None] = {}
    try:
        found.update(sound_tags(folder)[0])
        found[""] = read_commit(folder)
    except CheckpointError as error:
        return None if isinstance(error.__cause__, OSError) else found
    return found


def open_folder(folder: AnyPath, load_dir: AnyPath) -> Checkpoint:
    """Open the checkpoint in a tag's folder; `load_dir` is only used in error messages."""
    commit = read_commit(folder)
    if commit is None:
        raise CheckpointError(
            f"tag must name a checkpoint, but got tag={folder.name!r} in {str(load_dir)!r}, which "
            f"holds {_listed(sound_tags(load_dir)[0])}. Use one of these tags, or None for the "
            "latest."
        )
    return Checkpoint(
        folder, folder.name, commit, read_index(folder / commit.data / INDEX, commit.index_sha256)
    )


def _listed(tags: dict[str, Commit]) -> str:
    names = list(tags)
    if not names:
        return "no checkpoint"
    return f"the checkpoints {'..., ' if len(names) > 8 else ''}{', '.join(map(repr, names[-8:]))}"
