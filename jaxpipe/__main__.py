"""The program `jaxpipe`, also run as `python -m jaxpipe`, and its commands."""

import signal
import sys
from collections.abc import Sequence

from jaxpipe import __version__
from jaxpipe.config import main as config
from jaxpipe.errors import nearest
from jaxpipe.forecast import main as plan
from jaxpipe.launch import launch
from jaxpipe.optim import optim_values
from jaxpipe.partition import METHOD_NAMES
from jaxpipe.proof import main as prove
from jaxpipe.schedules import schedule_names

_WRONG_USE = 2
_COMMANDS = {
    "launch": (launch, "[options] SCRIPT [arguments]"),
    "plan": (plan, "[options] FILE:FUNCTION"),
    "prove": (prove, "[options] FILE:FUNCTION"),
    "config": (lambda words, prog: config(words, prog, _values()), "[KEY]"),
}


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
    name = words[0] if words else ""
    if name in _COMMANDS:
        return _COMMANDS[name][0](words[1:], f"jaxpipe {name}")
    if name in ("--version", "-V"):
        sys.stdout.write(f"jaxpipe {__version__}\n")
        return 0
    lines = [f"jaxpipe {command} {words}" for command, (_, words) in _COMMANDS.items()]
    lines += [f"jaxpipe {command} --help" for command in _COMMANDS]
    usage = "usage: " + "\n       ".join([*lines, "jaxpipe --version"]) + "\n"
    if name in ("--help", "-h"):
        sys.stdout.write(usage)
        return 0
    near = nearest(name, _COMMANDS)
    hint = f"jaxpipe: {name!r} is not a command. Did you mean {near!r}?\n" if near else ""
    sys.stderr.write(usage + hint)
    return _WRONG_USE


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
