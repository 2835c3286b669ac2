"""What a user names on the command line as `module:name`."""

import importlib
import sys
from typing import Any

from jaxpipe.errors import ConfigError


def import_named(text: str, what: str, example: str) -> Any:
    """Import what is named.

    Args:
        text: `module:name`; modules are looked for where the user is, as `python -m` does.
        what: What it is called, for errors: `JOB` or `--renames`.
        example: A right one.

    Raises:
        ConfigError: It is not of that form, or there is no such module or name.
    """
    name, colon, attribute = text.partition(":")
    if not (name and colon and attribute):
        raise ConfigError(f"{what} must be module:name, but got {text!r}. Write for instance {example}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what}'s module must be importable from here, but got {text!r}: {error}. Start where {name} lies, or "
            "install what it imports."
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{what} must name something in {name}, but got {attribute!r}. Define it there.")
    return getattr(module, attribute)
