"""One of the processes of a proof, which runs the same steps as the proof itself."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxpipe.distributed import init_distributed
from jaxpipe.tools.plan import read_axes

from ._optimizing import optimizing
from ._processes import steps_of
from ._prove import made_job, read_options


def main(argv: Sequence[str]) -> None:
    """Run the steps, and write the results from the first process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=Path)
    parser.add_argument("--as-is", action="store_true")
    parser.add_argument("--axes")
    parser.add_argument("job")
    args = parser.parse_args(argv)
    init_distributed(verbose=False)
    options = read_options(args.job)
    if args.axes is not None:
        options["axes"] = read_axes(args.axes)
    made = made_job(**options, as_is=args.as_is)
    with optimizing(fully=not made.is_small):
        found = steps_of(made.job)
    if jax.process_index() == 0:
        np.savez(args.to, **found)


if __name__ == "__main__":
    main(sys.argv[1:])
