"""Words as bash takes them."""

import shlex
from collections.abc import Iterable


def quoted(word: str) -> str:
    """Write a word for bash, on one line whatever is in it.

    A comment ends where its line does, so a line break between quotes would let the rest of a word
    be run. The word has no zero byte; bytes that are no text are as `os.fsdecode` gives them. Where
    nothing is special the word is unchanged, else it is in single quotes or in `$'...'`.
    """
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_escaped, word)) + "'"


def joined(words: Iterable[str]) -> str:
    """Write words for bash, on one line."""
    return " ".join(map(quoted, words))


def _escaped(letter: str) -> str:
    if letter.isprintable():
        return f"\\{letter}" if letter in "\\'" else letter
    return "".join(f"\\x{byte:02x}" for byte in letter.encode(errors="surrogateescape"))
