"""Readers of the fields that several models' configurations have."""

from jaxpipe.config import integer_of_at_least, list_of, number

# Of normal float32 numbers. Smaller ones are flushed to zero, and larger ones are infinite, so that
# for instance a norm would divide by zero or give zeros.
LEAST = 2.0**-126
_MOST = 3.4e38
_FITS = "Pass one that float32 can hold"

read_size = integer_of_at_least(1, below=2**31)
read_count = integer_of_at_least(0, below=2**31)
read_layers = list_of(read_count, "a list of layers, counted from 0")
read_positive = number(LEAST, below=_MOST, repair=_FITS)
read_base = number(above=1.0, below=_MOST, repair=_FITS)
read_share = number(0.0, below=1.0, repair="Use 0.0 for none")
read_deviation = number(0.0, below=_MOST, repair="Use for instance 0.02")
