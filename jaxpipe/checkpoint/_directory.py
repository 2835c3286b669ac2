"""The directory of checkpoints: committed tags, the latest tag, and leftovers.

    save_dir/latest                    the last committed tag
    save_dir/.lock/                    exists from a job's first save there until the job ends
    save_dir/<tag>/commit.json         names the data; a tag without it is not a checkpoint
    save_dir/<tag>/data-<n>-<x>/       index.json and the arrays

Saves are atomic. A save writes its data first and replaces `commit.json` last, in one step of the
file system, so a tag is complete or missing at every moment, even while it is being overwritten.
The target of a link belongs to somebody else: it is read, but never changed or removed.
"""

import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

from jaxpipe._util.files import parse_json
from jaxpipe._util.paths import any_path, read_any
from jaxpipe._util.stores import AnyPath, StorePath, at_once
from jaxpipe.distributed import log
from jaxpipe.errors import CheckpointError, shown

from ._lock import LOCK
from ._storage import (
    PARTIAL,
    make_marked,
    partials,
    remove_marked,
    repair,
    replace_file,
    sync_folder,
    was_made_here,
)

COMMIT = "commit.json"
LATEST = "latest"
ARRAYS = "arrays"
FORMAT = "jaxpipe checkpoint"
VERSION = 1

_LONGEST_TAG = 255
"""In bytes: the longest name of a folder on usual file systems."""
_DATA = re.compile(r"data-[0-9]+-[0-9a-f]+")
_STEP_TAG = re.compile(r"global_step([0-9]+)")


@dataclass(frozen=True)
class Commit:
    """The file whose presence makes a tag a checkpoint.

    Attributes:
        sequence: Number of the checkpoint in its directory, in the order of commits.
        data: Name of the folder next to this file that holds the data.
        index_sha256: Hexadecimal.
        is_latest: Whether the checkpoint can be found without its tag.
        saved_at: UTC.
    """

    sequence: int
    data: str
    index_sha256: str
    global_steps: int
    is_latest: bool
    saved_at: str


def step_tag(global_steps: int) -> str:
    """Return the default tag of a checkpoint, in DeepSpeed's form."""
    return f"global_step{global_steps}"


def check_tag(tag: Any) -> str:
    """Raise CheckpointError unless a tag can be the name of a folder."""
    if not isinstance(tag, str) or not _is_name(tag):
        raise CheckpointError(
            f"tag must be a plain name of a folder, of at most {_LONGEST_TAG} bytes, without "
            f"blanks at its ends, and not {LATEST!r}, {COMMIT!r} or {LOCK!r}, but got "
            f"tag={shown(tag)}. Write for instance 'best', or leave it out for 'global_step<N>'."
        )
    return tag


def _is_name(tag: str) -> bool:
    is_text = tag == tag.encode(errors="replace").decode()
    is_reserved = (
        tag in (".", "..", LATEST, COMMIT) or tag.startswith(LOCK) or tag.endswith(PARTIAL)
    )
    return (
        0 < len(tag.encode(errors="replace")) <= _LONGEST_TAG
        and tag == tag.strip()
        and is_text
        and not is_reserved
        and not {"/", "\\", "\0"} & set(tag)
    )


def read_commit(folder: AnyPath) -> Commit | None:
    """Read the commit in a tag's folder; None if nothing is committed."""
    path = folder / COMMIT
    try:
        content = read_any(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path} must be readable, but got {error.strerror or error}. "
            f"{repair(path, 'Check its permissions', error)}, or load another tag."
        ) from error
    try:
        given = parse_json(content)
        found = given.pop("format"), given.pop("version")
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise _damaged(path, f"{len(content)} bytes that are not a commit") from error
    if found[0] != FORMAT or found[1] != VERSION:
        raise CheckpointError(
            f"{path} must be of format={FORMAT!r}, version={VERSION}, but got "
            f"format={shown(found[0])}, version={shown(found[1])}. Open it with the release of "
            "jaxpipe that wrote it, or with a newer one."
        )
    try:
        commit = Commit(**given)
    except TypeError as error:
        raise _damaged(path, f"the entries {', '.join(given)[:200]}") from error
    for name, is_sound in _SOUND.items():
        value = getattr(commit, name)
        if not is_sound(value):
            raise _damaged(path, f"{name}={shown(value)}")
    return commit


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


_SOUND: Mapping[str, Callable[[Any], bool]] = {
    "sequence": lambda value: _is_count(value) and value > 0,
    "data": lambda value: isinstance(value, str) and _DATA.fullmatch(value) is not None,
    "index_sha256": lambda value: isinstance(value, str) and len(value) == 64,
    "global_steps": _is_count,
    "is_latest": lambda value: isinstance(value, bool),
    "saved_at": lambda value: isinstance(value, str),
}
"""Checks of a commit's entries."""


def _damaged(path: AnyPath, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path} must be a commit as save_checkpoint writes it, but got {found}: it is damaged. "
        "Load another tag, or restore the file, or move the folder away."
    )


def committed_tags(save_dir: str | PathLike[str] | StorePath) -> dict[str, Commit]:
    """List the checkpoints of a directory, oldest first.

    Args:
        save_dir: The directory that was passed to `save_checkpoint`.

    Returns:
        Commits by tag.

    Raises:
        CheckpointError: A commit is damaged, or the directory cannot be listed.
    """
    commits, damaged = sound_tags(any_path(save_dir, "save_dir"))
    for error in damaged.values():
        raise error
    return commits


def sound_tags(save_dir: AnyPath) -> tuple[dict[str, Commit], dict[str, CheckpointError]]:
    """Return a directory's checkpoints, oldest first, and its damaged commits' errors, by tag."""
    commits, damaged = _look_for_tags(save_dir)
    # The only checkpoint may have been replaced between listing and reading, but not twice.
    if not commits:
        commits, damaged = _look_for_tags(save_dir)
    return in_order(commits), damaged


def in_order(commits: Mapping[str, Commit]) -> dict[str, Commit]:
    """Sort commits by tag, oldest first."""
    return dict(sorted(commits.items(), key=lambda item: item[1].sequence))


def _look_for_tags(save_dir: AnyPath) -> tuple[dict[str, Commit], dict[str, CheckpointError]]:
    try:
        folders = _tag_folders(save_dir)
    except (FileNotFoundError, NotADirectoryError):
        return {}, {}
    except OSError as error:
        raise CheckpointError(
            f"{save_dir} must be a directory that can be listed, but got {error.strerror or error}."
            f" {repair(save_dir, 'Check its permissions', error)}."
        ) from error
    found = dict(zip((path.name for path in folders), at_once(_try_commit, folders), strict=True))
    return (
        {name: each for name, each in found.items() if isinstance(each, Commit)},
        {name: each for name, each in found.items() if isinstance(each, CheckpointError)},
    )


def _tag_folders(save_dir: AnyPath) -> list[AnyPath]:
    found = [path for path in save_dir.iterdir() if not path.name.startswith(LOCK)]
    return sorted((path for path in found if path.is_dir()), key=str)


def _try_commit(folder: AnyPath) -> Commit | CheckpointError | None:
    try:
        return read_commit(folder)
    except CheckpointError as error:
        return error


def read_latest(save_dir: AnyPath) -> str | None:
    """Return the tag that `latest` names; None if there is no such file."""
    path = save_dir / LATEST
    try:
        tag = read_any(path).decode().strip()
        if not _is_name(tag):
            raise ValueError(f"{shown(tag)}, which is not a tag")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} must be a readable text, but got {error}. Remove it: the latest checkpoint is "
            "found without it."
        ) from error
    return tag


def commit(save_dir: AnyPath, tag: str, content: Commit) -> None:
    """Turn a tag whose data is all on disk into a checkpoint, atomically; make `latest` name it."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(content)}, indent=1)
    replace_file(save_dir / tag / COMMIT, text.encode())
    if content.is_latest:
        try:
            replace_file(save_dir / LATEST, tag.encode())
        except OSError as error:  # the checkpoint can be found without `latest`
            log(
                logging.WARNING,
                "%s is committed, but %s still names another: %s",
                tag,
                save_dir / LATEST,
                error,
            )


def look_over(save_dir: AnyPath, known: dict[str, Commit]) -> list[AnyPath]:
    """Add the directory's checkpoints to `known`; return the data of unfinished saves, now removed.

    This job must have locked the directory, so that nobody else writes. Only data that no commit
    names is removed; what cannot be removed stays, with a warning, and is harmless.
    """
    # A new directory is listed twice: a store's first answer may be empty by mistake.
    folders = _tag_folders(save_dir) or _tag_folders(save_dir)
    for gone in known.keys() - {folder.name for folder in folders}:
        del known[gone]
    # Known commits cannot change under the lock. The tag saved last is read again because its old
    # data may have stayed.
    last = list(in_order(known))[-1:]
    new = [folder for folder in folders if folder.name not in known or folder.name in last]
    found = at_once(_look_at, new)
    known.update({folder.name: each for folder, (each, _) in zip(new, found, strict=True) if each})
    return [path for _, left in found for path in left] + _remove_partial(save_dir)


def _look_at(folder: AnyPath) -> tuple[Commit | None, list[AnyPath]]:
    """Return a tag's commit, and the paths of what was removed beside it."""
    named = _try_commit(folder)
    try:
        if isinstance(named, CheckpointError):
            raise named
        if folder.is_symlink():
            return named, []
        if named is None and any(path.name == COMMIT for path in folder.iterdir()):
            raise OSError(f"{folder / COMMIT} is listed and not found")
        left = remove_data(folder, None if named is None else named.data) + _remove_partial(folder)
        if left and not any(folder.iterdir()):
            folder.rmdir()
    except (CheckpointError, OSError) as error:
        log(logging.WARNING, "not cleaned up: %s", error)
        return named if isinstance(named, Commit) else None, []
    return named, left


def make_data(folder: AnyPath, sequence: int) -> AnyPath:
    """Make a marked folder for a checkpoint's data, with a name that no earlier attempt used."""
    data = folder / f"data-{sequence}-{secrets.token_hex(4)}"
    make_marked(data, ARRAYS)
    return data


def remove_data(folder: AnyPath, but: str | None = None) -> list[AnyPath]:
    """Remove all data in a tag's folder that jaxpipe made, except `but`; return what is removed."""
    data = [path for path in folder.iterdir() if _DATA.fullmatch(path.name) and path.name != but]
    return [
        path for path in data if was_made_here(path, ARRAYS) and _is_removed(path, remove_marked)
    ]


def _is_removed(path: AnyPath, remove: Callable[[AnyPath], object]) -> bool:
    try:
        remove(path)
    except OSError as error:
        log(logging.WARNING, "%s is not needed any more, but could not be removed: %s", path, error)
        return False
    return True


def _remove_partial(folder: AnyPath) -> list[AnyPath]:
    found = partials(folder, (COMMIT, LATEST))
    return [path for path in found if _is_removed(path, _unlink)]


def _unlink(path: AnyPath) -> None:
    path.unlink()


def remove_old(
    save_dir: AnyPath, known: dict[str, Commit], keep_last: int | None, keep_every: int | None
) -> None:
    """Remove checkpoints beyond the retention limits, from the directory and from `known`.

    This job must have locked the directory. Only tags `global_step<N>` are removed, never links.
    Kept: the last `keep_last` (None keeps all), each N that is a multiple of `keep_every`, the
    checkpoint that is found without its tag, and the one that `latest` still names.
    """
    if keep_last is None:
        return
    commits = in_order(known)
    own = [tag for tag, each in commits.items() if not _is_linked(save_dir / tag, each)]
    steps = {tag: int(match[1]) for tag in own if (match := _STEP_TAG.fullmatch(tag))}
    newest = [tag for tag, commit in commits.items() if commit.is_latest][-1:]
    retained = {
        *newest,
        read_latest(save_dir),
        *list(steps)[-keep_last:],
        *(tag for tag in steps if keep_every and steps[tag] % keep_every == 0),
    }
    for tag in steps.keys() - retained:
        del known[tag]  # also if it is not removed completely: the next save looks at it again
        _is_removed(save_dir / tag, _remove_tag)


def _is_linked(folder: AnyPath, commit: Commit) -> bool:
    """Whether a checkpoint's folder or its data is a link."""
    return folder.is_symlink() or (folder / commit.data).is_symlink()


def _remove_tag(folder: AnyPath) -> None:
    """Remove a checkpoint, the commit first, so that no partial checkpoint is ever visible."""
    (folder / COMMIT).unlink()
    sync_folder(folder)
    remove_data(folder)
    if not any(folder.iterdir()):
        folder.rmdir()


def next_sequence(commits: Mapping[str, Commit]) -> int:
    """Return the number of the next commit."""
    return 1 + max((each.sequence for each in commits.values()), default=0)
