"""`python -m jaxpipe.launch`, which is `jaxpipe launch`."""

import sys

from ._cli import launch

if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:], "python -m jaxpipe.launch"))
