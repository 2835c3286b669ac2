"""Quoting words for bash."""

import shlex
from collections.abc import Iterable


def quoted(word: str) -> str:
    """Quote a word for bash, always on one line.

    The result is also safe in a comment, where a line break between quotes would end the comment
    and run the rest of the word. The word must not contain a zero byte. Bytes that are not valid
    text are as decoded by `os.fsdecode`. A word without special characters is returned unchanged.
    Other words are put in single quotes or in `$'...'`.
    """
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_escaped, word)) + "'"


def joined(words: Iterable[str]) -> str:
    """Quote words for bash and join them on one line."""
    return " ".join(map(quoted, words))


def _escaped(letter: str) -> str:
    if letter.isprintable():
        return f"\\{letter}" if letter in "\\'" else letter
    return "".join(f"\\x{byte:02x}" for byte in letter.encode(errors="surrogateescape"))
