"""Directions in the space of states: vectors at a site, and dictionaries of many.

direction       one vector at a site, or one for each of several
control_vector  directions in the files of llama.cpp
dictionary      many at one site, and how strongly each acts in a state
layouts         the files in which other libraries keep dictionaries
proof           whether a dictionary is what its file says
"""
