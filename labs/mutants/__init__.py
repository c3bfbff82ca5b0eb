"""Small faults drawn at random in the package, and the tests that find them:
`make mutants`, or `python -m labs.mutants --seed 6 --count 60`.

operators  the faults that a line can have
draw       which of them are tried, and those that no test can see
trial      one fault in a copy of the package, held against the tests
report     what is printed, and the page that `--write` writes
entropy    an analysis in somebody else's package, right and wrong in twelve ways

`equivalent.toml` puts aside what no test can see, by name and with the reason.
"""
