"""Small datasets that come with the package, read by name:
`hiddenscope.read("cities-incomplete")`.

cities-incomplete  50 sentences that stop just before Toronto or Montreal, the label
cities-complete    50 sentences about one city or the other, each ending in a full stop
plain              plain English sentences, without labels
"""
