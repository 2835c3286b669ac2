"""`python -m jaxpipe.checkpoint inspect|verify|export`."""

import logging
import sys

import jax

from ._cli import main

if __name__ == "__main__":
    # Reading needs no accelerator, and takes none from those who do.
    jax.config.update("jax_platforms", "cpu")
    # Where a read fails, Orbax's other reads under way raise too, in threads and loops where nobody
    # catches it. Both lines silence these: the error that is reported is the first.
    sys.unraisablehook = lambda _: None
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.exit(main())
