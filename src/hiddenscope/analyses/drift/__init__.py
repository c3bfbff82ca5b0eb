"""Where do two runs of a model diverge, is it rounding or a fault, and which module?

drift                 the function, and the choice of how two sides are compared
live_model            a side that can be run; sides: how it is opened and checked
saved                 a side of saved states; saved_layouts: what their layers are
port, program         a side of other make: a module or function of token ids
pairing               which tensors of a program are which states
parts, whole          the two comparisons: part by part on equal input, or whole passes
streaming             two passes in step, to save memory
observe               one pass: its states, replacements for them, and their rounding
noise                 the test that decides
systematic            the same for faults below the rounding of any single token
errors                errors by site and token
dtypes                the precision that weights were stored and computed in
search                from the first site that differs to the module at fault
port_search           the same in a port; port_block: one block of it, call by call
counterparts, weights which tensors and weights of a port are the reference's
calls                 recorded calls of modules
hints                 what a fault looks like, by hypotheses about a suspect
cause                 what explains a difference: dtypes, weights, quantisation or code
moved                 which layers and tokens moved, and how far
baseline, result      accepted errors; errors and findings as a result
"""
