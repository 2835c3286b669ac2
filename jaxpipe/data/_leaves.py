"""Conversion of leaves to numpy arrays, and the faults of leaves that are not arrays of numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxpipe.errors import DataError

_SHOWN = 60
_LONG = (np.dtype(np.longdouble), np.dtype(np.clongdouble))
_WIDEST = (np.dtype(np.float64), np.dtype(np.complex128))


def array_fault(leaf: Any) -> tuple[str, str] | None:
    """What a leaf is instead of an array of numbers, and the repair; None if it is one."""
    if isinstance(leaf, np.ma.MaskedArray):
        return (
            f"a masked array of {leaf.dtype}{list(leaf.shape)}",
            "Fill it, and pass its mask as a separate array",
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return f"the shape {leaf.dtype}{list(leaf.shape)} without values", "Give an array"
    if isinstance(leaf, jax.Array):
        if fault := _unreadable(leaf):
            return fault
        dtype: Any = leaf.dtype
    else:
        try:
            dtype = np.asarray(leaf).dtype
        except Exception as error:  # noqa: BLE001  # whatever the object's __array__ raises
            first = (str(error).splitlines() or [""])[0]
            return (
                f"a {type(leaf).__name__} that numpy cannot read ({type(error).__name__}: {first})",
                "Convert it to a numpy array",
            )
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return (
            f"PRNG keys, {dtype}{list(leaf.shape)}",
            "Pass jax.random.key_data(keys), and wrap them where they are used",
        )
    # The format of numpy's long double depends on the machine, and XLA supports none of them.
    if dtype in _LONG and dtype not in _WIDEST:
        return f"an array of {dtype}", "Convert it to float32"
    if not jnp.issubdtype(dtype, jnp.number) and dtype != np.bool_:
        text = " ".join(repr(leaf).split())
        shown = text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
        return f"{shown}, of dtype {dtype}", "Encode it as numbers, or leave it out"
    return None


def _unreadable(leaf: jax.Array) -> tuple[str, str] | None:
    """The reason why this process cannot read an array's values, as in `array_fault`."""
    what = f"{leaf.dtype}{list(leaf.shape)}"
    if isinstance(leaf, Tracer):
        return (
            f"{what} inside jax.jit or another transformation of JAX",
            "Call the engine outside of it, since it compiles its own programs, or use "
            "jaxpipe.make_pipeline, whose step is a function of arrays",
        )
    if leaf.is_deleted():
        return (
            f"an array that has been deleted or donated, {what}",
            "Keep a copy of arrays that are passed to a program that donates them",
        )
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        return (
            f"a global array with parts on other processes, {what}",
            "Give the samples of this process as a local array",
        )
    return None


def host_array(leaf: Any, where: str) -> np.ndarray:
    """Convert a leaf of a batch, named `where` in errors, to numpy in the machine's byte order.

    The array may share the leaf's memory. Raises DataError if the leaf is not an array of numbers,
    or if its integers do not fit the dtype on the device.
    """
    fault = array_fault(leaf)
    if fault is not None:
        raise DataError(
            f"A leaf of a batch must be an array of numbers, but got {where} = {fault[0]}. "
            f"{fault[1]}."
        )
    # An explicit transfer: `jax.transfer_guard` may refuse implicit ones.
    array = np.asarray(jax.device_get(leaf) if isinstance(leaf, jax.Array) else leaf)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    on_device = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind in "iu" and on_device != array.dtype and array.size:
        limits = np.iinfo(on_device)
        least = array.min()
        most = array.max()
        if least < limits.min or most > limits.max:
            raise DataError(
                f"Integers of a batch must fit into {on_device}, their dtype on devices, but "
                f"got {where} with values from {least} to {most}. Use smaller numbers, or "
                "jax.config.update('jax_enable_x64', True)."
            )
    return array
