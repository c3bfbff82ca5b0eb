"""Pictures of results, drawn from one payload in every place that shows them."""

# docs/views.md tells users to import the values of a picture from here.
from hiddenscope.results.pictures import Graph as Graph
from hiddenscope.results.pictures import Grid as Grid
from hiddenscope.results.pictures import Lines as Lines
from hiddenscope.results.pictures import Measure as Measure
from hiddenscope.results.pictures import Panels as Panels
from hiddenscope.results.pictures import Series as Series
from hiddenscope.results.pictures import Words as Words
from hiddenscope.views.payload import pack as pack
from hiddenscope.views.payload import unpack as unpack
