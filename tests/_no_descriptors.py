"""A process that may not open any more files."""

import contextlib
import os
import resource
import tracemalloc  # noqa: F401  # imported by the hook of pytest, which could not then
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def no_descriptors(num_free: int = 0) -> Generator[None]:
    """Leave only that many free descriptors within the body."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < last:  # fill the gaps
        taken.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(last, taken[-1]) + 1 + num_free, hard))
    try:
        yield
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
