"""`python -m jaxpipe.forecast JOB`, which is `jaxpipe plan JOB`."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
