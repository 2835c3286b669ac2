"""What may go into the JSON part of a checkpoint."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpipe.errors import CheckpointError

_BYTES = "base64"


def check_json(value: Any, where: str) -> None:
    """Refuse a value that would not come back as it is.

    Args:
        value: The value.
        where: What it is called, for the error.

    Raises:
        CheckpointError: Something in it is neither None, a truth value, number or string, nor a list or a dictionary
            with strings for keys.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"keys of {where} must be strings, as they are stored as JSON, but got key={key!r}. "
                    f"Write {str(key)!r}."
                )
            check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check_json(item, f"{where}[{i}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise CheckpointError(
            f"{where} must be a number, a string, true, false or None, or a list or dictionary of such, as it is "
            f"stored as JSON, but got a {type(value).__name__}. {_repair(value)}"
        )


def _repair(value: Any) -> str:
    if isinstance(value, tuple | set):
        return "Write list(...)."
    if isinstance(value, np.generic) or (hasattr(value, "item") and getattr(value, "shape", None) == ()):
        return "Write value.item()."
    if hasattr(value, "tolist"):
        return "Write value.tolist(), or make it a collection of a layer if it is large."
    return "Store what it can be made from."


def encode_state(value: Any, where: str) -> Any:
    """The state of a data iterator as JSON.

    Args:
        value: Bytes, or what JSON knows; numbers of numpy become Python's.
        where: What it is called, for the error.

    Returns:
        The JSON value.

    Raises:
        CheckpointError: It is of another type.
    """
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        check_json(dict.fromkeys(value), where)
        items = {key: encode_state(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {_BYTES: None, "mapping": items} if _BYTES in items else items
    if isinstance(value, list | tuple):
        return [encode_state(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    check_json(value, where)
    return value


def decode_state(value: Any) -> Any:
    """The inverse of `encode_state`."""
    if isinstance(value, dict):
        if value.get(_BYTES) is not None:
            return base64.b64decode(value[_BYTES])
        if _BYTES in value:
            value = value["mapping"]
        return {key: decode_state(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_state(item) for item in value]
    return value
