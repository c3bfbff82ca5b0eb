"""Where do the states of a model live, and how is that known?"""

from typing import TYPE_CHECKING

from hiddenscope.interface import analysis

if TYPE_CHECKING:
    from hiddenscope.annotations import ModelLike, Result


@analysis()
def anatomy(model: "ModelLike") -> "Result":
    """Show where every layer of a model can be read, and how that is known.

    Each state is compared with Hugging Face's own `hidden_states`. The largest
    difference is 0 for every layer but the last: `layer.L` is raw, and the last entry
    has gone through the final norm. A model that reports no such states is resumed at
    each of its own, and its output compared.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.anatomy(hs.load((tiny_model("gpt2"), None)))
    >>> for row in result.data.to_dataframe().itertuples():
    ...     same = "the same" if row.difference == 0 else "different"
    ...     print(row.Index, row.entry, same)
    layer.0 hidden_states[0] the same
    layer.1 hidden_states[1] the same
    layer.2 hidden_states[2] the same
    layer.3 hidden_states[3] different
    final hidden_states[3] the same
    """
    from hiddenscope.analyses.anatomy.compute import describe_parts

    return describe_parts(model)
