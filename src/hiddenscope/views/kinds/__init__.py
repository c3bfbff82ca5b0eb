"""One module for each kind of result: its views, its findings and its sections.

`registry.py` imports `<word>.py` for the analysis of that word and finds its functions
by their names: `views`, `findings`, `sections` and `tables`.
"""
