"""`python -m jaxpipe.checkpoint inspect|verify|export`."""

import logging
import sys

import jax

from ._cli import main

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # reading needs no accelerator, and takes none from those who do
    # Where a read fails, those under way beside it complain when they end; the error itself is told once.
    sys.unraisablehook = lambda _: None
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.exit(main())
