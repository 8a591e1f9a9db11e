"""Sphinx configuration of the documentation: `make docs`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pipeline  # noqa: E402

project = "Maxray"
release = pipeline.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.mermaid",
    "docs.extensions.api",
    "docs.extensions.commands",
    "docs.extensions.http",
    "docs.extensions.specs",
]
exclude_patterns = ["_build"]
suppress_warnings = ["ref.python"]  # `Spec` in a signature has several targets

# Markdown
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4

# API reference
default_role = "code"  # docstrings use single backticks
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "exclude-members": "Spec, model_config",  # the reference of components has the fields
}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# HTML
html_theme = "furo"
html_show_copyright = False
html_title = f"Maxray {release}"
html_theme_options = {"source_view_link": "", "navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["tables.css"]
