"""How Sphinx builds the documentation: `sphinx-build -W --keep-going -b html docs <folder>`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import _generate  # noqa: E402

import jaxpipe  # noqa: E402

project = "jaxpipe"
release = version = jaxpipe.__version__
html_title = "jaxpipe"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "sphinx_book_theme"

# Blocks are run by tests/docs/test_blocks.py: a build needs no devices.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# Comments and trailing commas are read in configurations, and not by the colouring of JSON.
suppress_warnings = ["misc.highlighting_failure"]

autodoc_typehints = "none"
autodoc_member_order = "bysource"

_generate.write_configuration(HERE / "_build" / "configuration.md")
_generate.write_schedules(HERE / "_build")
