"""How Sphinx builds these pages: `python -m sphinx -W --keep-going docs docs/_build`.

Nothing is fetched, neither when they are built nor when they are read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, List

HERE = Path(__file__).parent
# The package of this checkout, not one that is installed; and docstrings.py.
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import docstrings
from sphinx.domains.python import PyObject
from sphinx.util import logging

import lossscale

project = "lossscale"
author = "the authors of lossscale"
project_copyright = author
version = release = lossscale.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "_pictures", "jupyter_execute"]
# A hosting site shows a page as it is in the repository, and a directive as mere text.
# So directives are in comments `<!-- sphinx ... -->`, which are opened here. What a
# hosting site shows instead is between `<!-- hosted -->` and `<!-- /hosted -->`.
nitpicky = True  # a name that leads nowhere is a warning

# The notebook is run when the pages are built, with the package of this checkout.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_output_stderr = "remove"  # what TensorFlow says of the machine
os.environ["PYTHONPATH"] = str(HERE.parent)

# Markdown: headings are links, as they are where the repository is shown.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Docstrings: Google sections. What a type is, the sections say in words.
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
default_role = "code"
highlight_language = "none"  # of fences that name none
toc_object_entries_show_parents = "hide"
add_module_names = False

html_theme = "pydata_sphinx_theme"
html_title = "lossscale"
html_static_path = ["_static"]
html_css_files = ["lossscale.css"]
html_js_files = ["tables.js"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "show_prev_next": True,
    "github_url": "https://github.com/lossscale/lossscale",
    "navigation_with_keys": False,
    "header_links_before_dropdown": 7,
    "navbar_align": "left",
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}
html_sidebars = {"index": [], "start": [], "new": [], "changes": []}


def _convert(_app: Any, what: str, *others: Any) -> None:
    lines: List[str] = others[-1]
    lines[:] = docstrings.to_rest(lines, what)


def _fill(_app: Any, page: str, source: List[str]) -> None:
    source[0] = docstrings.opened(source[0])
    if page == "api/loss-scales":
        source[0] = docstrings.filled(source[0], docstrings.loss_scales(lossscale))


def _check(app: Any, env: Any) -> None:
    del app
    documented = list(env.get_domain("py").objects)
    for name in docstrings.missing(lossscale.__all__, documented):
        message = "%s is public and has no entry in the API reference: docs/api"
        logging.getLogger(__name__).warning(message, name)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("source-read", _fill)
    # Before napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", _convert, priority=400)
    app.connect("env-check-consistency", _check)
