"""Logging in one process instead of all."""

import logging

import jax

from jaxpipe.errors import printable


def log(level: int, message: str, *values: object) -> None:
    """Write to the logger `jaxpipe` in process 0; `message` has `%` placeholders for the values."""
    if jax.process_index() == 0:
        text = message % values if values else message
        logging.getLogger("jaxpipe").log(level, "%s", printable(text))
