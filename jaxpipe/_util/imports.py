"""Objects that a user names on the command line as `module:name` or `file.py:name`."""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

from jaxpipe.errors import ConfigError, JaxpipeError, nearest


def import_named(text: str, what: str, example: str) -> Any:
    """Import `module:name` or `file.py:name`, which `what`, such as `JOB`, names in errors.

    The module may be in the working directory, as with `python -m`. A file is imported with its
    folder first on `sys.path`, as with `python FILE`, or as part of the package that contains it.
    `example` is a correct value.
    """
    source, _, attribute = text.rpartition(":")
    if not (source and attribute):
        raise ConfigError(
            f"{what} must be module:name or file.py:name, but got {text!r}. Write for instance "
            f"{example}."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    file = Path(source).resolve() if source.endswith(".py") or os.sep in source else None
    name = source if file is None else _module_of(file, text, what)
    wrong = f"{what}'s module must be importable from here, but got {text!r}: "
    with user_code(wrong, f"Fix {source}."):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{wrong}{error}. Start in the folder of {name}, or install the packages that it "
                "imports."
            ) from error
    found = getattr(module, "__file__", None)
    if file is not None and (found is None or not file.samefile(found)):
        raise ConfigError(
            f"{what} must be a file with a name of its own, but got {text!r}, and {name} is "
            f"{found or 'a module of Python'}. Rename the file."
        )
    if not hasattr(module, attribute):
        raise ConfigError(
            f"{what} must name something in {source}, but got {attribute!r}. Define it there."
        )
    return getattr(module, attribute)


def _module_of(file: Path, text: str, what: str) -> str:
    """The name under which a file can be imported, after adding the folder to `sys.path`."""
    if not file.is_file():
        near = nearest(file.name, [each.name for each in file.parent.glob("*.py")])
        raise ConfigError(
            f"{what}'s file must exist, but got {text!r}, and {file} is not there. "
            f"{f'Did you mean {near}?' if near else 'Correct the path.'}"
        )
    if file.suffix != ".py" or "." in file.stem:
        raise ConfigError(
            f"{what}'s file must be NAME.py, with one dot, as Python can import it, but got "
            f"{text!r}. Rename the file."
        )
    folder = file.parent
    names = [file.stem]
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    sys.path.insert(0, str(folder))
    return ".".join(names)


@contextlib.contextmanager
def user_code(what: str, repair: str) -> Generator[None]:
    """Convert what a user's code raises to a ConfigError, in one line between two texts."""
    try:
        yield
    except JaxpipeError:
        raise
    # `sys.exit` is an error too: the command has not done its work by then.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}{raised(error)}. {repair}") from error


def raised(error: BaseException) -> str:
    """An error of a user's code in one line: its class, its message, and the line of code."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    # The message of a syntax error already names the file and line, which no frame has run.
    place = (
        ""
        if isinstance(error, SyntaxError)
        else f" ({Path(last.filename).name}, line {last.lineno})"
    )
    return f"{type(error).__name__}: {error}{place}"
