"""How Sphinx builds the documentation: `make docs`.

The source is the repository itself, so that a relative link leads to the same file on a code host and in the site.
"""

from typing import Any

from lerobot_craft import __version__

project = "CRaFT"
copyright = "The CRaFT developers"
version = release = __version__

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "examples/*.md", "docs/*.md", "docs/decisions/*.md", "benchmarks/*/*.md"]
# Not looked into: a virtual environment alone has tens of thousands of files.
exclude_patterns = [".*", "outputs", "build", "dist", "src", "tests", "data", "wandb"]

myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 4  # the anchors that code hosts give to headings
myst_dmath_double_inline = True

html_theme = "furo"
html_title = f"CRaFT {__version__}"
html_copy_source = False
html_show_copyright = False
highlight_language = "none"  # most blocks without a language are command lines
templates_path = ["_templates"]
# `root_doc` is in docs/: whoever opens the directory itself is sent there.
html_additional_pages = {"index": "to-root-page.html"}


def setup(app: Any) -> dict[str, Any]:
    """Nothing of the build depends on the order in which pages are read."""
    return {"parallel_read_safe": True, "parallel_write_safe": True}
