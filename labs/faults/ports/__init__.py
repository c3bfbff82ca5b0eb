"""Ports: models in plain PyTorch with other layouts than the reference's, and faults.

maths     norms, attention, rotation, blocks, and mistakes in their code
llama     Llama and Phi-3: split, fused, Meta's layout, folded norms, custom linears
gpt2      GPT-2: split, folded, packed; and BERT packed
experts   Mixtral and Qwen2-MoE with experts in a loop
layouts   the ports by name, and the references that they are made of
plant     the faults, where they can be planted, and what is then true

>>> reference = PORTS["split-gpt2"].reference()
>>> planted = plant(PORTS["split-gpt2"], reference, "weight_scaled attn.key")
>>> planted.path.endswith(".attn.key"), planted.names(planted.path.replace("key", "query"))
(True, 'wrong')
"""

from labs.faults.ports.layouts import PORTS, PortLayout
from labs.faults.ports.maths import Port
from labs.faults.ports.plant import PlantedInPort, PortFault, faults_of, plant

__all__ = [
    "PORTS",
    "PlantedInPort",
    "Port",
    "PortFault",
    "PortLayout",
    "faults_of",
    "plant",
]
