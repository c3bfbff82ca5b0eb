"""What can be asked of `anatomy`: nothing but a model."""

from hiddenscope.catalog.parameters import Description

DESCRIPTION = Description()
