"""`python -m jaxpipe.forecast JOB`, the same as `jaxpipe plan JOB`."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
