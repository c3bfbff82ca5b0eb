"""How does an analysis change along a series of models?

member        a model of a series: where it comes from and what it is called
weight_files  the hash of the weights in a folder, before any of them is loaded
identity      what decides the numbers of a member: its weights and all else
parameters    the analyses that a series can run, and their options
question      the analysis that every member is asked, its options and its texts
folder        results that are kept member by member, so that a job can be resumed
run           one model in memory at a time
depths        one axis for models of different depths
arrays        the results of all members as labelled arrays
findings      which members are the same, and a few numbers of each
facts         the keys of the facts
"""
