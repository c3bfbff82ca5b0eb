"""What is done before a release: look into the archives, and try them elsewhere.

`make dist` builds the wheel and the sdist in dist/ and looks into them. `make smoke`
installs the wheel in an empty environment and uses it there.
"""
