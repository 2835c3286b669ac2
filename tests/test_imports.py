"""What importing the package brings in."""

import subprocess
import sys

# `jaxpipe --help`, the keys of a configuration and the errors answer without it.
PROGRAM = """
import sys
import jaxpipe, jaxpipe.config, jaxpipe.errors, jaxpipe.partition, jaxpipe.schedules
from jaxpipe.__main__ import main
assert main(["--help"]) == 0
assert {"jax", "numpy"}.isdisjoint(sys.modules)
from jaxpipe import *
assert "jax" in sys.modules and callable(initialize)
"""


def test_jax_is_imported_with_the_first_name_that_needs_it() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
