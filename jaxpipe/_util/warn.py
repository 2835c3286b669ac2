"""Warnings that name the user's line."""

import inspect
import warnings

# Packages whose frames lie between the user's line and a warning.
_PASSED = ("jaxpipe", "jax", "flax", "contextlib", "functools", "importlib")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line: the nearest one outside this package and the libraries below it.

    `stacklevel` of `warnings.warn` counts frames, whose number differs between callers.
    """
    frame = last = inspect.currentframe()
    while frame is not None and _module(frame.f_globals).partition(".")[0] in _PASSED:
        last, frame = frame, frame.f_back
    frame = frame or last
    assert frame is not None  # no Python that JAX runs on is without frames
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, category, *place, _module(frame.f_globals), registry)


def _module(names: dict[str, object]) -> str:
    return str(names.get("__name__", ""))
