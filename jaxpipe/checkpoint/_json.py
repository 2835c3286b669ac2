"""Conversion and checks of the values in the JSON part of a checkpoint."""

import base64
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpipe.errors import CheckpointError, shown

_BYTES = "base64"
_DEEPEST = 100
_MOST_DIGITS = 4300
_MOST_BITS = 14284
"""Python refuses to parse integers with more digits; integers of fewer bits are never longer."""
_SHOWN = 200


def check_json(value: Any, where: str, depth: int = 0) -> None:
    """Refuse a value that does not survive a round trip through JSON; `where` names it in errors.

    NumPy scalars are allowed, and come back as Python numbers. `depth` counts the lists and
    dictionaries around the value.
    """
    if isinstance(value, np.generic):
        value = value.item()
    # A container that contains itself ends here too.
    if depth > _DEEPEST:
        raise CheckpointError(
            f"{where[:_SHOWN]}... must be nested at most {_DEEPEST} deep, as it is stored as JSON, "
            "but got one that is nested deeper, or contains itself. Store plain values to rebuild "
            "it from."
        )
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"keys of {where} must be strings, as they are stored as JSON, but got "
                    f"key={shown(key)}. Write {shown(key, lambda given: repr(str(given)))}."
                )
            check_json(item, f"{where}[{shown(key)}]", depth + 1)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check_json(item, f"{where}[{i}]", depth + 1)
    elif type(value) is int and value.bit_length() > _MOST_BITS:
        raise CheckpointError(
            f"{where} must be a number of at most {_MOST_DIGITS} digits, as it is stored as JSON, "
            f"but got one of {value.bit_length()} bits. Write hex(value)."
        )
    elif value is not None and type(value) not in (bool, int, float, str):
        raise CheckpointError(
            f"{where} must be a number, a string, true, false or None, or a list or dictionary of "
            f"these, as it is stored as JSON, but got a {type(value).__name__}. {_repair(value)}"
        )


def _repair(value: Any) -> str:
    if isinstance(value, tuple | set):
        return "Write list(...)."
    if isinstance(value, np.generic) or (
        hasattr(value, "item") and getattr(value, "shape", None) == ()
    ):
        return "Write value.item()."
    if hasattr(value, "tolist"):
        return "Write value.tolist(), or make it a collection of a layer if it is large."
    return "Store plain values to rebuild it from."


def dump_json(value: Any) -> str:
    """Convert a value that `check_json` allows to JSON."""
    return json.dumps(value, default=np.generic.item)


def encode_state(value: Any, where: str, depth: int = 0) -> Any:
    """Encode the state of a data iterator as a JSON value; `where` and `depth` as for `check_json`.

    Takes JSON values, bytes, tuples, dictionaries with integer keys, NumPy arrays and torch
    tensors. NumPy scalars become Python numbers.
    """
    if depth > _DEEPEST:
        check_json(None, where, depth)
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if _is_array(value):
        array = np.asarray(value)
        return {
            _BYTES: None,
            "array": base64.b64encode(array.tobytes()).decode(),
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "is_torch": not isinstance(value, np.ndarray),
        }
    if isinstance(value, Mapping):
        items = {
            key: encode_state(item, f"{where}[{shown(key)}]", depth + 1)
            for key, item in value.items()
        }
        if any(type(key) is int for key in items):
            check_json({key: None for key in items if type(key) is not int}, where)
            return {_BYTES: None, "items": [list(each) for each in items.items()]}
        check_json(dict.fromkeys(value), where)
        return {_BYTES: None, "mapping": items} if _BYTES in items else items
    if isinstance(value, list | tuple):
        items = [encode_state(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        return {_BYTES: None, "tuple": items} if isinstance(value, tuple) else items
    check_json(value, where, depth)
    return value.item() if isinstance(value, np.generic) else value


def _is_array(value: Any) -> bool:
    """Whether a value is a NumPy array of numbers or text, or a torch tensor NumPy can read."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufcSU"
    kind = type(value)
    if (kind.__module__, kind.__name__) != ("torch", "Tensor"):
        return False
    # NumPy has no bfloat16. Tensors on a device or with gradients are not state of a data iterator.
    is_plain = value.device.type == "cpu" and not value.requires_grad
    return is_plain and f"{value.dtype}" != "torch.bfloat16"


def decode_state(value: Any) -> Any:
    """Decode a result of `encode_state`.

    Another value raises KeyError, AttributeError, TypeError or ValueError.
    """
    if isinstance(value, list):
        return [decode_state(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get(_BYTES) is not None:
        return base64.b64decode(value[_BYTES])
    if _BYTES not in value:
        return {key: decode_state(item) for key, item in value.items()}
    if "array" in value:
        content = bytearray(base64.b64decode(value["array"]))
        array = np.ndarray(value["shape"], np.dtype(value["dtype"]), content)
        # Without torch, no code in the process can expect a torch tensor.
        is_tensor = value["is_torch"] and importlib.util.find_spec("torch") is not None
        return importlib.import_module("torch").from_numpy(array) if is_tensor else array
    if "tuple" in value:
        return tuple(decode_state(value["tuple"]))
    pairs = value["items"] if "items" in value else value["mapping"].items()
    return {key: decode_state(item) for key, item in pairs}
