"""Pictures of results, drawn from one payload in every place that shows them."""

from hiddenscope.views.payload import pack as pack
from hiddenscope.views.payload import unpack as unpack
