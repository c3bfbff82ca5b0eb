"""Sites: the addresses of states, the patterns that select several, and the names that
other tools give them.

    layer.3              the hidden state (residual stream) after three blocks
    layer.0              the state that enters the first block
    layer.3.attn         inside the block that makes layer 3: attn, cross, mid, mlp
    layer.3.attn.head.5  inside its attention: q, k, v, z, head.0, head.1, ...
    layer.3.mlp.neurons  inside its MLP: neurons, neuron.0, neuron.1, ...
    layer.3.router       the probabilities over the experts of its MLP
    final                the last layer after the model's final norm
    encoder.layer.3      the same with two stacks: encoder.*, decoder.*

    layer.*          every layer
    layer.3-7        some layers
    layer.-1         the last layer
    layer.3.*        attn, cross, mid and mlp of block 3
    *.attn           one part of every block
    *.attn.head.*    every head; head.0-3 are some of a block
    *                everything but the sites inside attention and MLP
    a,b              a list

A pattern without a stack matches both.

>>> gpt2 = [*(Site(k) for k in range(13)), Site(None)]
>>> [str(site) for site in select("layer.3-5, hidden_states[12]", gpt2)]
['layer.3', 'layer.4', 'layer.5', 'final']
"""

from hiddenscope.sites.patterns import (
    SitePatterns,
    check_syntax,
    named_layer,
    names_inner,
    names_neurons,
    select,
    summarise,
)
from hiddenscope.sites.site import (
    MOST_LAYERS,
    PARTS,
    STACKS,
    Site,
    from_alias,
    to_alias,
)

__all__ = [
    "MOST_LAYERS",
    "PARTS",
    "STACKS",
    "Site",
    "SitePatterns",
    "check_syntax",
    "from_alias",
    "named_layer",
    "names_inner",
    "names_neurons",
    "select",
    "summarise",
    "to_alias",
]
