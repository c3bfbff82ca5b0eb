"""Planted faults: does `hs.drift` find the site and the module at fault?

models    the models that faults are planted in, and the texts they read
planted   kinds of porting mistake, and changes that do no harm
ports     models in plain PyTorch with other layouts, and faults in them
oracle    what is true of a planted fault, by plain hooks; port_oracle: in a port
pairs     the planted faults and the harmless pairs, all from one seed
trial     one pair, compared by drift
report    the tables
small     small faults and sound pairs for the systematic test
"""
