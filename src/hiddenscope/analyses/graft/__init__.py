"""What does another model of the same shape break or mend? Its blocks or states,
grafted into this one layer by layer.
"""
