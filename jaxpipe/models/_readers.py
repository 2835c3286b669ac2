"""Readers of the fields that several models' configurations have."""

from jaxpipe._util.numbers import as_number
from jaxpipe.config import Reader, integer_of_at_least, list_of, number, wrong_value

# Of normal float32 numbers. Smaller ones are flushed to zero, and larger ones are infinite, so that
# for instance a norm would divide by zero or give zeros.
LEAST = 2.0**-126
_MOST = 3.4e38


def _read_above(limit: float) -> Reader:
    def read(value: object, path: str) -> float:
        found = as_number(value)
        if found is None or not max(LEAST, limit) <= found <= _MOST or found == limit:
            rule = f"a finite number > {limit:g}"
            raise wrong_value(path, rule, value, "Pass one that float32 can hold")
        # As it was written: `transformers` refuses 24.0 where a file must have 24.
        return value if type(value) is int else found

    return read


read_size = integer_of_at_least(1, below=2**31)
read_count = integer_of_at_least(0, below=2**31)
read_layers = list_of(read_count, "a list of layers, counted from 0")
read_positive = _read_above(0.0)
read_base = _read_above(1.0)
read_share = number(0.0, below=1.0, repair="Use 0.0 for none")
read_deviation = number(0.0, below=_MOST, repair="Use for instance 0.02")
