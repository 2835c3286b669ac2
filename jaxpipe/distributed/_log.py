"""A log that is written once, not once per process."""

import logging

import jax


def log(level: int, message: str, *values: object) -> None:
    """Write to the logger `jaxpipe` in process 0.

    Args:
        level: As for `logging.Logger.log`.
        message: With places for the values, in the form of `%`.
        *values: The values.
    """
    if jax.process_index() == 0:
        logging.getLogger("jaxpipe").log(level, message, *values)
