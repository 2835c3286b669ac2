"""`python -m jaxpipe.launch`, and the program `jaxpipe`."""

import sys
from collections.abc import Sequence

from ._cli import launch

_USAGE = "usage: jaxpipe launch [options] SCRIPT [arguments]\n       jaxpipe launch --help\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program `jaxpipe`.

    Args:
        argv: The arguments, `launch` first; None: those of the process.

    Returns:
        The exit status; see `jaxpipe launch --help`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["launch"]:
        return launch(words[1:], "jaxpipe launch")
    is_help = words in (["--help"], ["-h"])
    (sys.stdout if is_help else sys.stderr).write(_USAGE)
    return 0 if is_help else 2


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:], "python -m jaxpipe.launch"))
