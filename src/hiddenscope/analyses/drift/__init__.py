"""Where do two runs of a model diverge, is it rounding or a fault, and which module?

drift        the function, and the choice of how two sides are compared
live_model   a side that can be run: its states, its dtypes, and how it is called
pairing      a side of other make, a module or function of token ids, and its states
saved        a side of saved states, and what their layers are
compare      the two comparisons: part by part on equal input, or whole passes
observe      one pass: its states, their rounding, and the calls of modules
errors       errors by site and token, and the test that decides
systematic   the same for faults below the rounding of any single token
search       from the first site that differs to the module at fault
ports        the same in a port, whose modules have other names and layouts
hints        what a fault looks like, by hypotheses about a suspect
cause        what explains a difference: dtypes, weights, quantisation or code
result       errors and findings as a result, and accepted errors in a file
"""
