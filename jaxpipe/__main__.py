"""The program `jaxpipe`, also run as `python -m jaxpipe`, and its commands."""

import signal
import sys
from collections.abc import Sequence

from jaxpipe.config import main as config
from jaxpipe.forecast import main as plan
from jaxpipe.launch import launch
from jaxpipe.optim import optim_values
from jaxpipe.partition import METHOD_NAMES
from jaxpipe.proof import main as prove
from jaxpipe.schedules import schedule_names

_USAGE = """usage: jaxpipe launch [options] SCRIPT [arguments]
       jaxpipe plan [options] MODULE:FUNCTION
       jaxpipe prove [options] MODULE:FUNCTION
       jaxpipe config [KEY]
       jaxpipe launch --help
       jaxpipe plan --help
       jaxpipe prove --help
       jaxpipe config --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program `jaxpipe`.

    Args:
        argv: The arguments, starting with a command. None uses the arguments of the process.

    Returns:
        The exit status of the command, see for example `jaxpipe launch --help`.
    """
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        sys.stderr.write("jaxpipe: interrupted\n")
        return 128 + signal.SIGINT


def _run(words: list[str]) -> int:
    if words[:1] == ["launch"]:
        return launch(words[1:], "jaxpipe launch")
    if words[:1] == ["plan"]:
        return plan(words[1:], "jaxpipe plan")
    if words[:1] == ["prove"]:
        return prove(words[1:], "jaxpipe prove")
    if words[:1] == ["config"]:
        return config(words[1:], "jaxpipe config", _values())
    is_help = words in (["--help"], ["-h"])
    (sys.stdout if is_help else sys.stderr).write(_USAGE)
    return 0 if is_help else 2


def _values() -> dict[str, str]:
    """Maps the path of a key to the names that its value may have, from other packages."""
    schedules = ", ".join(map(repr, ["auto", *schedule_names()]))
    return {
        "pipeline.schedule": schedules,
        "pipeline.partition": METHOD_NAMES,
        **optim_values(),
    }


if __name__ == "__main__":
    sys.exit(main())
