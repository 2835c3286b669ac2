"""`python -m jaxpipe.checkpoint inspect|verify|export`."""

import logging
import sys

import jax

from ._cli import main

if __name__ == "__main__":
    # Reading needs no accelerator, so leave them to other programs.
    jax.config.update("jax_platforms", "cpu")
    # When a read fails, Orbax's other pending reads raise too, in threads and event loops where
    # nobody catches the errors. The next two lines silence them: only the first error is reported.
    sys.unraisablehook = lambda _: None
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.exit(main())
