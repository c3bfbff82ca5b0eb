"""Planted faults: kinds of porting mistake, and changes that do no harm.

A fault is planted in a copy of a model, at a random place that follows from a seed, and
declares beforehand the first site at which it shows and the module that is at fault.
`hs.drift` is measured with them (`make faults`).

fault       a kind as a value, and a fault that was planted
parts       where the parts of a model are, found by structure
weights     checkpoints converted, loaded, cut or rounded wrongly
attention   scale, mask, window, softmax, heads and rotation
functions   activations, norms, residuals, layers, dtypes, dropout, routers
modelwide   embeddings, positions, masks, rotary tables, the head
unnamed     random changes of random modules
harmless    other kernels, layouts and orders of the same maths
ports       models written from scratch in other layouts, with faults in them

>>> from hiddenscope.testing import tiny_model
>>> planted = KINDS["norm_eps"].plant(tiny_model("llama"), layer=2, rng=1)
>>> planted.first_site, planted.path.startswith("model.layers.2.")
('layer.3', True)
"""

from labs.faults.planted.attention import ATTENTION
from labs.faults.planted.fault import Damage, Fault, Planted
from labs.faults.planted.functions import FUNCTIONS
from labs.faults.planted.harmless import HARMLESS, Harmless
from labs.faults.planted.modelwide import MODELWIDE
from labs.faults.planted.parts import ModelParts
from labs.faults.planted.unnamed import UNNAMED as _UNNAMED
from labs.faults.planted.weights import WEIGHTS

KINDS: dict[str, Fault] = {
    kind.name: kind for kind in (*WEIGHTS, *ATTENTION, *FUNCTIONS, *MODELWIDE)
}
UNNAMED: dict[str, Fault] = {kind.name: kind for kind in _UNNAMED}

__all__ = [
    "HARMLESS",
    "KINDS",
    "UNNAMED",
    "Damage",
    "Fault",
    "Harmless",
    "ModelParts",
    "Planted",
]
