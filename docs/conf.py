"""How Sphinx builds the documentation: `sphinx-build -W --keep-going -b html docs <folder>`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import _generate  # noqa: E402
import _messages  # noqa: E402
import _pictures  # noqa: E402
import _prose  # noqa: E402
import _rendered  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402
from sphinx.errors import ExtensionError  # noqa: E402

import jaxpipe  # noqa: E402

project = "jaxpipe"
author = "The jaxpipe authors"
copyright = author  # noqa: A001  # Sphinx's name
release = version = jaxpipe.__version__
html_title = "jaxpipe"
# The apostrophe after a code span would become an opening quotation mark.
smartquotes_action = "D"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "sphinx_book_theme"
html_theme_options = {"navbar_persistent": [], "use_download_button": False, "show_navbar_depth": 1}
html_context = {"default_mode": "auto"}
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_extra_path = ["_build/whole_pages"]
html_css_files = ["jaxpipe.css"]

# Notebooks are run when the site is built. The blocks of other pages are not:
# tests/docs/test_blocks.py runs them.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 240
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# Comments and trailing commas are read in configurations, and not by the colouring of JSON.
suppress_warnings = ["misc.highlighting_failure"]

# The types of many arguments are unions of JAX's and optax's own, longer than the docstring that
# says them in words.
autodoc_typehints = "none"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autosummary_generate = False
napoleon_use_ivar = True
napoleon_attr_annotations = False

_generate.write_schedules(HERE / "_build")
_generate.write_families(HERE / "_build")
_pictures.write_pictures(HERE / "_build")
_generate.write_plan(HERE / "_build" / "whole_pages")


def finish(app: Sphinx, error: Exception | None) -> None:
    """Write `llms.txt`; fail if a page shows markup, or a picture cuts a text off."""
    if not error:
        _generate.write_llms(app)
    found = [] if error else _rendered.faults_of_site(Path(app.outdir))
    if found:
        raise ExtensionError("\n".join(["pages are not as they should be:", *found]))


def setup(app: Sphinx) -> None:
    """Connect what is done to pages, docstrings and signatures."""
    app.connect("source-read", _prose.check_prose)
    app.connect("source-read", _messages.show_messages)
    app.connect("autodoc-process-docstring", _generate.mark_code, priority=100)
    app.connect("autodoc-process-signature", _generate.hide_arguments)
    app.connect("missing-reference", _generate.find_in_package)
    app.connect("build-finished", finish)
