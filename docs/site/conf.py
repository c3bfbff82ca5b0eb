"""Settings of Sphinx. `python -m docs.site` writes the pages that it reads."""

import hiddenscope

project = "hiddenscope"
author = "the authors of hiddenscope"
version = release = hiddenscope.__version__
language = "en"
# A token such as " Paris" begins with a space: its first mark would be turned the wrong
# way round.
smartquotes = False

extensions = ["myst_parser", "docs.site.formulas", "docs.site.names"]
# Headings get the anchors that GitHub gives them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "dollarmath"]
# Money and shell variables are no formulas.
myst_dmath_allow_space = False
myst_dmath_allow_digits = False

add_module_names = False
python_maximum_signature_line_length = 72
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "hiddenscope"
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["search-from-disk.js", "live-theme.js"]
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
# Light or dark as the reader's system is.
html_context = {"default_mode": "auto"}
html_math_renderer = "formulas"
# A page with one entry in its section needs no list of it.
html_sidebars = {
    "index": [],
    "experiments": [],
    "coming-from": [],
    "errors": [],
}
html_theme_options = {
    "logo": {"text": "hiddenscope"},
    "header_links_before_dropdown": 9,
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
    "navbar_end": ["theme-switcher"],
    # The theme would leave a place for advertisements there.
    "primary_sidebar_end": [],
    "show_nav_level": 1,
    "show_toc_level": 2,
    "secondary_sidebar_items": {"**": ["page-toc"], "index": []},
    "footer_start": ["release"],
    "footer_end": [],
    "back_to_top_button": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
