"""The program `jaxpipe`, and `python -m jaxpipe`: one word says which command."""

import sys
from collections.abc import Sequence

from jaxpipe.forecast import main as plan
from jaxpipe.launch import launch

_USAGE = """usage: jaxpipe launch [options] SCRIPT [arguments]
       jaxpipe plan [options] MODULE:FUNCTION
       jaxpipe launch --help
       jaxpipe plan --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program `jaxpipe`.

    Args:
        argv: The arguments, a command first; None: those of the process.

    Returns:
        The exit status; see `jaxpipe launch --help` and `jaxpipe plan --help`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["launch"]:
        return launch(words[1:], "jaxpipe launch")
    if words[:1] == ["plan"]:
        return plan(words[1:], "jaxpipe plan")
    is_help = words in (["--help"], ["-h"])
    (sys.stdout if is_help else sys.stderr).write(_USAGE)
    return 0 if is_help else 2


if __name__ == "__main__":
    sys.exit(main())
