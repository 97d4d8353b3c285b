"""How Sphinx builds the documentation: ``make docs``."""

from importlib.metadata import version as installed_version

project = "paged_kv"
author = "the paged_kv authors"
copyright = author  # noqa: A001 (Sphinx's name)
version = release = installed_version("paged-kv")

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
nitpicky = True  # a reference that leads nowhere is a warning, and warnings are errors
exclude_patterns = ["conf.py"]

html_theme = "furo"
html_title = "paged_kv"
html_copy_source = False
html_show_sphinx = False

# Single backticks are code: in the docstrings they name parameters.
default_role = "code"

# Links to headings, as in the list at the top of the design.
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say more: shapes, units, dtypes

numpydoc_show_class_members = False  # autodoc lists them
