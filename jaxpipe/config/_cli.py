"""`jaxpipe config`: the reference of the configuration keys on the command line."""

import argparse
import sys
from collections.abc import Sequence

from jaxpipe.errors import ConfigError

from ._reference import Names, reference_markdown, reference_text

_WRONG_USE = 2


def main(argv: Sequence[str] | None, prog: str, names: Names) -> int:
    """Run `jaxpipe config`; return 0, or 2 for an unknown key.

    `names` maps the path of a key to the names that its value may have: schedules, partition
    methods and optimisers are defined in packages that this one does not import.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description="The keys of the configuration, with their defaults and meanings."
    )
    parser.add_argument(
        "key",
        nargs="?",
        metavar="KEY",
        help="a key, such as pipeline.schedule, or a section, such as pipeline; default: all keys",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print all keys as the page of the documentation"
    )
    args = parser.parse_args(argv)
    if args.markdown and args.key is not None:
        parser.error(f"--markdown must be given without KEY, but got {args.key}. Leave one out.")
    try:
        text = reference_markdown(names) if args.markdown else reference_text(names, args.key)
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return _WRONG_USE
    sys.stdout.write(f"{text}\n")
    return 0
