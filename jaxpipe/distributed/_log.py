"""Logging in one process instead of all."""

import logging

import jax


def log(level: int, message: str, *values: object) -> None:
    """Write to the logger `jaxpipe` in process 0.

    Args:
        level: As for `logging.Logger.log`.
        message: The message, with `%` placeholders for the values.
        *values: The values.
    """
    if jax.process_index() == 0:
        logging.getLogger("jaxpipe").log(level, message, *values)
