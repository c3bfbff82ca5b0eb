"""Aliases: what Hugging Face and TransformerLens call a site."""

import re
from typing import Literal

from hiddenscope.errors import SiteError
from hiddenscope.sites.site import Site, not_a_site, quoted

HIDDEN_STATES = re.compile(
    r"(?:(?P<stack>encoder|decoder)_)?hidden_states\[(?P<k>-?[0-9]{1,6})\]"
)
_LENS = re.compile(
    r"(?P<stack>blocks|encoder|decoder)\.(?P<block>[0-9]{1,6})"
    r"\.(?P<hook>(?:(?:attn|cross_attn|mlp)\.)?hook_[a-z_]+)"
)
_LENS_FINAL = "ln_final.hook_normalized"
_HOOKS = {
    "hook_attn_out": "attn",
    "hook_cross_attn_out": "cross",
    "hook_resid_mid": "mid",
    "hook_mlp_out": "mlp",
}
_INNER_HOOKS = {
    "attn.hook_rot_q": "attn.q",
    "attn.hook_rot_k": "attn.k",
    "attn.hook_v": "attn.v",
    "attn.hook_z": "attn.z",
    "cross_attn.hook_z": "cross.z",
    "mlp.hook_post": "mlp.neurons",
}
# Not every model of TransformerLens has these, so no site is printed like this.
_NEVER_PRINTED = ("attn.q", "attn.k")


def is_alias(name: str) -> bool:
    """Tell whether a name is spelled like those of Hugging Face or TransformerLens."""
    if name == _LENS_FINAL:
        return True
    return bool(HIDDEN_STATES.fullmatch(name) or _LENS.fullmatch(name))


def from_alias(name: str, *, depth: int, final: bool) -> Site:
    """Return the site that Hugging Face or TransformerLens calls `name`.

    `hidden_states[depth]` is `final` if the model has a final norm: Hugging Face norms
    the last entry and no other. TransformerLens takes the residual stream before a
    post-norm block's own norm, so in a model without a final norm only its
    `hook_resid_pre` and `hook_normalized_resid_post` are sites.

    >>> from_alias("hidden_states[12]", depth=12, final=True)
    Site('final')
    >>> from_alias("blocks.4.hook_resid_post", depth=12, final=True)
    Site('layer.5')
    >>> from_alias("blocks.4.attn.hook_z", depth=12, final=True)
    Site('layer.5.attn.z')
    """
    match = HIDDEN_STATES.fullmatch(name)
    if match:
        k = int(match["k"])
        if k < 0:
            k += depth + 1
        if not 0 <= k <= depth:
            raise SiteError(
                f"No {quoted(name)}",
                f"the tuple has {depth + 1} entries",
                f"Choose 0 to {depth}.",
            )
        layer = None if final and k == depth else k
        return Site(layer, stack=match["stack"])
    match = _LENS.fullmatch(name)
    if match:
        return _from_lens(name, match, depth, final)
    if name == _LENS_FINAL:
        raise SiteError(
            f"No site for {quoted(name)}",
            "TransformerLens records it before the norm's own weight, so it is not"
            " final",
            "Choose 'final', or the raw last layer, 'layer.-1'.",
        )
    raise not_a_site(name)


def to_alias(
    site: Site,
    kind: Literal["hidden_states", "transformer_lens"],
    *,
    depth: int,
    final: bool,
) -> str | None:
    """Return what Hugging Face or TransformerLens calls a site; None if nothing.

    >>> to_alias(Site(5), "transformer_lens", depth=12, final=True)
    'blocks.4.hook_resid_post'
    >>> print(to_alias(Site(12), "hidden_states", depth=12, final=True))
    None
    """
    if (site.layer or 0) > depth or (site.layer is None and not final):
        return None
    if kind == "hidden_states":
        # Hugging Face overwrites the raw last layer with the normed one.
        if site.part or (final and site.layer == depth):
            return None
        k = depth if site.layer is None else site.layer
        prefix = f"{site.stack}_" if site.stack else ""
        return f"{prefix}hidden_states[{k}]"
    if kind == "transformer_lens":
        return _to_lens(site, final)
    raise SiteError(
        f"No names of the kind {quoted(kind)}",
        "the kinds are 'hidden_states' and 'transformer_lens'",
        "Choose one of them.",
    )


def _from_lens(name: str, match: re.Match[str], depth: int, final: bool) -> Site:
    block = int(match["block"])
    hook = match["hook"]
    stack = None if match["stack"] == "blocks" else match["stack"]
    if block >= depth:
        reason = f"there are {depth} blocks, counted from 0"
        raise SiteError(
            f"No block {block} for {quoted(name)}",
            reason,
            f"Choose 0 to {depth - 1}.",
        )
    if hook == "hook_resid_pre":
        return Site(block, stack=stack)
    if hook == ("hook_resid_post" if final else "hook_normalized_resid_post"):
        return Site(block + 1, stack=stack)
    if hook in _INNER_HOOKS:
        return Site(block + 1, _INNER_HOOKS[hook], stack)
    if not final and (hook == "hook_resid_post" or hook in _HOOKS):
        raise SiteError(
            f"No site for {quoted(name)}",
            "in a model without a final norm TransformerLens takes it before the"
            " block's own norm",
            f"Choose 'layer.{block + 1}', the block's output.",
        )
    # A decoder's block has two middles, of which the one after cross-attention is
    # before the MLP.
    if stack == "decoder" and hook == "hook_resid_mid":
        raise not_a_site(name)
    if stack == "decoder" and hook == "hook_resid_mid_cross":
        hook = "hook_resid_mid"
    if hook not in _HOOKS:
        raise _elsewhere(name, hook, Site(block + 1, stack=stack))
    return Site(block + 1, _HOOKS[hook], stack)


def _elsewhere(name: str, hook: str, layer: Site) -> SiteError:
    """Return the error for a hook of TransformerLens that is not a single site."""
    module, _, point = hook.rpartition(".")
    branch = f"{layer}.{'cross' if module == 'cross_attn' else 'attn'}"
    problem = f"No site for {quoted(name)}"
    if point in ("hook_q", "hook_k"):
        return SiteError(
            problem,
            "TransformerLens takes it before rotary positions, which the scores use",
            f"Choose '{branch}.{point[-1]}', after them.",
        )
    if point == "hook_result":
        reason = "it holds what every head adds"
        return SiteError(problem, reason, f"Choose '{branch}.head.*'.")
    if point in ("hook_pattern", "hook_attn_scores"):
        reason = "weights of attention are not the state of a token"
        return SiteError(problem, reason, "Use hs.attention(model, text).")
    return not_a_site(name)


def _to_lens(site: Site, final: bool) -> str | None:
    if site.layer is None:
        return None
    blocks = site.stack or "blocks"
    if site.layer == 0:
        return f"{blocks}.0.hook_resid_pre"
    hook = _hook_of(site, final)
    return None if hook is None else f"{blocks}.{site.layer - 1}.{hook}"


def _hook_of(site: Site, final: bool) -> str | None:
    if not site.part:
        return "hook_resid_post" if final else "hook_normalized_resid_post"
    names = _INNER_HOOKS if site.is_inner else _HOOKS
    if site.part in _NEVER_PRINTED or not (final or site.is_inner):
        return None
    if site.stack == "decoder" and site.part == "mid":
        return "hook_resid_mid_cross"
    for hook, part in names.items():
        if part == site.part:
            return hook
    return None
