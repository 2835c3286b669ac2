"""Objects that a user names on the command line as `module:name`."""

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any

from jaxpipe.errors import ConfigError, JaxpipeError


def import_named(text: str, what: str, example: str) -> Any:
    """Import `module:name`, also from the working directory, as `python -m` does.

    `what` is its name in errors, for example `JOB` or `--renames`. `example` is a correct value.
    Raises ConfigError also if the module raises an error.
    """
    name, colon, attribute = text.partition(":")
    if not (name and colon and attribute):
        raise ConfigError(
            f"{what} must be module:name, but got {text!r}. Write for instance {example}."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what}'s module must be importable from here, but got {text!r}: {error}. Start in "
            f"the folder of {name}, or install the packages that it imports."
        ) from error
    except JaxpipeError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what}'s module must be importable from here, but got {text!r}: {raised(error)}. "
            f"Fix {name}."
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(
            f"{what} must name something in {name}, but got {attribute!r}. Define it there."
        )
    return getattr(module, attribute)


def raised(error: Exception) -> str:
    """An error of a user's code in one line: its class, its message, and the line of code."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    # The message of a syntax error already names the file and line, which no frame has run.
    place = (
        ""
        if isinstance(error, SyntaxError)
        else f" ({Path(last.filename).name}, line {last.lineno})"
    )
    return f"{type(error).__name__}: {error}{place}"
