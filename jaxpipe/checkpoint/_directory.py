"""The directory that checkpoints lie in: which tags are committed, which is the latest, what is left over.

    save_dir/latest                    the last committed tag
    save_dir/<tag>/commit.json         names the data; a tag without it is no checkpoint
    save_dir/<tag>/data-<n>-<x>/       index.json, and the arrays

A save writes its data first and replaces `commit.json` last, in one step of the file system. So a tag is whole or not
there at every moment, also while it is being written again.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from jaxpipe.errors import CheckpointError
from jaxpipe.processes import log

COMMIT = "commit.json"
LATEST = "latest"
ARRAYS = "arrays"
FORMAT = "jaxpipe checkpoint"
VERSION = 1

_DATA = re.compile(r"data-[0-9]+-[0-9a-f]+")
_STEP_TAG = re.compile(r"global_step([0-9]+)")
_PARTIAL = ".partial"
_MARK = ".jaxpipe"


@dataclass(frozen=True)
class Commit:
    """What makes a tag a checkpoint.

    Attributes:
        sequence: Counts the checkpoints of a directory in the order of their commits.
        data: The folder beside it that holds the data.
        index_sha256: Hash of the index, in hexadecimal.
        global_steps: Batches trained.
        is_latest: Whether it may be found without its tag.
        saved_at: When, in UTC.
    """

    sequence: int
    data: str
    index_sha256: str
    global_steps: int
    is_latest: bool
    saved_at: str


def step_tag(global_steps: int) -> str:
    """The tag of a checkpoint that is given none; DeepSpeed's form."""
    return f"global_step{global_steps}"


def check_tag(tag: Any) -> str:
    """Refuse what cannot be the name of a folder.

    Raises:
        CheckpointError: The tag is no string, empty, or a path.
    """
    if not isinstance(tag, str) or not _is_name(tag):
        raise CheckpointError(
            f"tag must be a plain name of a folder, without blanks at its ends, and not {LATEST!r} or {COMMIT!r}, but "
            f"got tag={tag!r}. Write for instance 'best', or leave it out for 'global_step<N>'."
        )
    return tag


def _is_name(tag: str) -> bool:
    is_text = tag == tag.encode(errors="replace").decode()
    is_reserved = tag in (".", "..", LATEST, COMMIT) or tag.endswith(_PARTIAL)
    return bool(tag) and tag == tag.strip() and is_text and not is_reserved and not {"/", "\\", "\0"} & set(tag)


def read_commit(folder: Path) -> Commit | None:
    """The commit of a tag.

    Args:
        folder: The tag's folder.

    Returns:
        What is committed there; None: nothing.

    Raises:
        CheckpointError: It cannot be read, is damaged, or of a format that is not known.
    """
    path = folder / COMMIT
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path} must be readable, but got {error.strerror or error}. Check its permissions, or load another tag."
        ) from error
    try:
        given = json.loads(content)
        found = given.pop("format"), given.pop("version")
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise _damaged(path, f"{len(content)} bytes that are no commit") from error
    if found[0] != FORMAT or found[1] != VERSION:
        raise CheckpointError(
            f"{path} must be of format={FORMAT!r}, version={VERSION}, but got format={found[0]!r}, "
            f"version={found[1]!r}. Open it with the release of jaxpipe that wrote it, or with a newer one."
        )
    try:
        commit = Commit(**given)
        is_sound = bool(_DATA.fullmatch(commit.data)) and commit.sequence > 0 and len(commit.index_sha256) == 64
    except TypeError as error:
        raise _damaged(path, f"the entries {', '.join(map(str, given))}") from error
    if not is_sound:
        raise _damaged(path, f"data={commit.data!r}, sequence={commit.sequence!r}")
    return commit


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path} must be a commit as save_checkpoint writes it, but got {found}: it is damaged. Load another tag, or "
        "restore the file, or move the folder away."
    )


def committed_tags(save_dir: str | PathLike[str]) -> dict[str, Commit]:
    """The checkpoints of a directory, the oldest first.

    Raises:
        CheckpointError: A commit is damaged, or the directory cannot be listed.
    """
    commits, damaged = sound_tags(Path(save_dir))
    for error in damaged.values():
        raise error
    return commits


def sound_tags(save_dir: Path) -> tuple[dict[str, Commit], dict[str, CheckpointError]]:
    """The checkpoints of a directory, the oldest first, and what is wrong with the folders whose commit is damaged.

    Raises:
        CheckpointError: The directory cannot be listed.
    """
    try:
        folders = sorted(path for path in save_dir.iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return {}, {}
    except OSError as error:
        raise CheckpointError(
            f"{save_dir} must be a directory that can be listed, but got {error.strerror or error}."
            " Check its permissions."
        ) from error
    commits: dict[str, Commit] = {}
    damaged: dict[str, CheckpointError] = {}
    for folder in folders:
        try:
            found = read_commit(folder)
        except CheckpointError as error:
            damaged[folder.name] = error
        else:
            commits |= {} if found is None else {folder.name: found}
    return dict(sorted(commits.items(), key=lambda item: item[1].sequence)), damaged


def read_latest(save_dir: Path) -> str | None:
    """The tag that `latest` names; None where there is no such file.

    Raises:
        CheckpointError: The file cannot be read.
    """
    path = save_dir / LATEST
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} must be a readable text, but got {error}. Remove it: the latest checkpoint is found without it."
        ) from error


def commit(save_dir: Path, tag: str, content: Commit) -> None:
    """Make a tag a checkpoint, in one step, and let `latest` name it.

    Args:
        save_dir: The directory.
        tag: The tag, whose data is all there.
        content: What to commit.
    """
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(content)}, indent=1)
    replace_file(save_dir / tag / COMMIT, text.encode())
    if content.is_latest:
        try:
            replace_file(save_dir / LATEST, tag.encode())
        except OSError as error:  # the checkpoint is there, and is found without the file
            log(logging.WARNING, "%s is committed, but %s still names another: %s", tag, save_dir / LATEST, error)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that at every moment it is the old one or the new one, and stays after a loss of power."""
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    sync_folders([path.parent])


def sync_folders(folders: Iterable[Path]) -> None:
    """Let the names in some folders stay after a loss of power."""
    for folder in folders:
        with contextlib.suppress(OSError):  # not every file system opens folders
            number = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)


def remove_leftovers(save_dir: Path) -> list[Path]:
    """Remove what unfinished saves left: data that no commit names. Nothing else is touched.

    Args:
        save_dir: The directory; only one job may save there.

    Returns:
        What was removed.

    Raises:
        OSError: Something cannot be removed.
    """
    removed: list[Path] = []
    for folder in [path for path in save_dir.iterdir() if path.is_dir() and not path.is_symlink()]:
        try:
            named = read_commit(folder)
        except CheckpointError as error:
            log(logging.WARNING, "left alone: %s", error)
            continue
        left = remove_data(folder, None if named is None else named.data)
        left += _remove_partial(folder)
        if left and not any(folder.iterdir()):
            folder.rmdir()
        removed += left
    return removed + _remove_partial(save_dir)


def make_data(folder: Path, sequence: int) -> Path:
    """Make a folder for the data of a checkpoint, marked as such, with a name that no attempt before had."""
    data = folder / f"data-{sequence}-{secrets.token_hex(4)}"
    folder.mkdir(parents=True, exist_ok=True)
    data.mkdir()
    (data / _MARK).mkdir()
    return data


def remove_data(folder: Path, but: str | None = None) -> list[Path]:
    """Remove the data in a tag's folder that was made here, all but one.

    Returns:
        What was removed.
    """
    data = [path for path in folder.iterdir() if _DATA.fullmatch(path.name) and path.name != but]
    own = [path for path in data if (path / _MARK).is_dir() or (path.is_dir() and not any(path.iterdir()))]
    for path in own:
        for inner in [inner for inner in path.iterdir() if inner.name != _MARK]:
            shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
        shutil.rmtree(path)  # the mark goes last
    return own


def _remove_partial(folder: Path) -> list[Path]:
    found = [path for name in (COMMIT, LATEST) if (path := folder / (name + _PARTIAL)).exists()]
    for path in found:
        path.unlink()
    return found


def remove_old(save_dir: Path, keep_last: int | None, keep_every: int | None) -> list[str]:
    """Remove the checkpoints that need not be kept. Only tags of the form `global_step<N>` are.

    Args:
        save_dir: The directory.
        keep_last: How many to keep; None: all.
        keep_every: Keep also those whose N is a multiple of this. The one that is found without its tag is always kept.

    Returns:
        The tags that were removed, the oldest first.
    """
    if keep_last is None:
        return []
    commits, _ = sound_tags(save_dir)
    steps = {tag: int(match[1]) for tag in commits if (match := _STEP_TAG.fullmatch(tag))}
    newest = [tag for tag, commit in commits.items() if commit.is_latest][-1:]
    kept = {*newest, *list(steps)[-keep_last:], *(tag for tag in steps if keep_every and steps[tag] % keep_every == 0)}
    old = [tag for tag in steps if tag not in kept]
    for tag in old:
        remove_tag(save_dir / tag)
    return old


def remove_tag(folder: Path) -> None:
    """Remove a checkpoint: first the commit, so that it is never half there."""
    (folder / COMMIT).unlink()
    remove_data(folder)
    if not any(folder.iterdir()):
        folder.rmdir()


def next_sequence(commits: Mapping[str, Commit]) -> int:
    """The number of the next commit."""
    return 1 + max((each.sequence for each in commits.values()), default=0)
