"""What can be asked of `graft`."""

from hiddenscope.interface.parameters import Description, Parameter, data, sites

DATA_HELP = "Prompts, each labelled with its answer: a file, or a shipped dataset."

DESCRIPTION = Description(
    (
        Parameter(
            "donor",
            "model",
            "A model of the same shape, from which layers are taken.",
            required=True,
            positional=True,
        ),
        data(DATA_HELP, form_help=DATA_HELP),
        sites(None, "Take states in place of blocks: *.attn, *.mlp or layer.*."),
        Parameter(
            "layers",
            "integer",
            "How many layers in a row come from the donor.",
            default=1,
            aside=True,
        ),
    ),
    verb_if_head_needed="graft into",
    action="Graft another model",
    promise="You will see, layer by layer, what becomes of the answers when blocks of"
    " the other model take the place of this one's.",
)
