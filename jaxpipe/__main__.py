"""The program `jaxpipe`, also run as `python -m jaxpipe`, and its commands."""

import signal
import sys
from collections.abc import Sequence

from jaxpipe import __version__
from jaxpipe.errors import nearest

_WRONG_USE = 2


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


def _launch(words: list[str], prog: str) -> int:
    from jaxpipe.launch import launch

    return launch(words, prog)


def _plan(words: list[str], prog: str) -> int:
    from jaxpipe.tools.plan import plan_command

    return plan_command(words, prog)


def _prove(words: list[str], prog: str) -> int:
    from jaxpipe.tools.prove import main

    return main(words, prog)


def _config(words: list[str], prog: str) -> int:
    from jaxpipe.config import main
    from jaxpipe.optim import optim_values
    from jaxpipe.schedules import schedule_names
    from jaxpipe.schedules.partition import METHOD_NAMES

    # Names that keys may have as values, from the packages that define them.
    values = {
        "pipeline.schedule": ", ".join(map(repr, ["auto", *schedule_names()])),
        "pipeline.partition": METHOD_NAMES,
        **optim_values(),
    }
    return main(words, prog, values)


# Each command imports what it needs, most of them JAX, when it runs.
_COMMANDS = {
    "launch": (_launch, "[options] SCRIPT [arguments]"),
    "plan": (_plan, "[options] FILE:FUNCTION"),
    "prove": (_prove, "[options] FILE:FUNCTION"),
    "config": (_config, "[KEY]"),
}


if __name__ == "__main__":
    sys.exit(main())
