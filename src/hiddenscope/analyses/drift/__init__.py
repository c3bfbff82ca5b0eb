"""Where do two runs of a model diverge, is that rounding or a fault, and which module
made it?

sides          what the two sides are, and on what terms they are compared
pairing        which tensors of a port are which states
parts, whole   the two ways to compare: part by part on equal input, or by whole passes
observe        one pass: its states, others put in their place, and what rounding does to every part
noise          the comparison that decides
systematic     the same for faults that are smaller than the rounding of any one token
search         from the first site that differs down to the module at fault
port_search    the same where a port's modules have other names and layouts
hints          what the fault looks like
result         errors and findings as a result
"""
