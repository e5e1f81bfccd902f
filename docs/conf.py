"""Sphinx settings: MyST pages, warnings are errors (``make docs``)."""

project = "cdmpp"
copyright = "the cdmpp authors, Apache 2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
html_theme = "furo"
autodoc_typehints = "description"
autodoc_mock_imports: list[str] = []
# Pages link files of the repository too, which are no pages.
suppress_warnings = ["myst.xref_missing"]
