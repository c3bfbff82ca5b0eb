"""Sites: the grammar of addresses, patterns and aliases."""

import contextlib
import random
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiddenscope.errors import SiteError
from hiddenscope.sites import (
    PARTS,
    Site,
    check_syntax,
    from_alias,
    select,
    summarise,
    to_alias,
)


def stack_sites(
    depth: int,
    *,
    final: bool = True,
    parts: tuple[str, ...] = (),
    stack: str | None = None,
) -> list[Site]:
    layers = [Site(k, stack=stack) for k in range(depth + 1)]
    inner = [Site(k, part, stack) for k in range(1, depth + 1) for part in parts]
    return [*layers, *inner, *([Site(None, stack=stack)] if final else [])]


def names(sites: tuple[Site, ...]) -> list[str]:
    return [str(site) for site in sites]


GPT2 = stack_sites(12, parts=("attn", "mid", "mlp"))
BERT = stack_sites(12, final=False, parts=("attn", "mlp"))
T5 = stack_sites(6, stack="encoder", parts=("attn", "mid", "mlp")) + stack_sites(
    3, stack="decoder", parts=PARTS
)

STACKS = st.sampled_from([None, "encoder", "decoder"])
ANY_SITE = st.one_of(
    st.builds(Site, st.integers(1, 999_999), st.sampled_from(["", *PARTS]), STACKS),
    st.builds(Site, st.sampled_from([0, None]), st.just(""), STACKS),
)


@settings(deadline=None)
@given(ANY_SITE)
def test_what_is_printed_is_parsed(site: Site) -> None:
    assert Site.parse(str(site)) == site
    assert str(site) in repr(site)


@settings(deadline=None)
@given(st.text())
def test_whatever_is_parsed_prints_itself_or_raises(text: str) -> None:
    with contextlib.suppress(SiteError):
        assert str(Site.parse(text)) == text


@settings(deadline=None)
@given(st.lists(ANY_SITE, unique=True))
def test_order_is_total(sites: list[Site]) -> None:
    ordered = sorted(sites)
    assert all(a < b and b > a and a <= b and not b <= a for a, b in pairwise(ordered))
    random.shuffle(sites)
    assert sorted(sites) == ordered


def test_order_is_that_of_the_pass() -> None:
    said = [
        "layer.2",
        "layer.3.attn",
        "layer.3.cross",
        "layer.3.mid",
        "layer.3.mlp",
        "layer.3",
        "layer.10",
        "final",
    ]
    assert [str(site) for site in sorted({Site.parse(name) for name in said})] == said
    assert Site.parse("encoder.final") < Site.parse("decoder.layer.0")


NO_ADDRESS = [
    "layer",
    "layer.",
    "layer.-1",
    "layer.03",
    "layer.٣",
    "Layer.3",
    "layer.3.",
    "layer.3.head",
    "final.attn",
    "layer.0.attn",
    "encoder",
    "middle.layer.3",
    "layer.9999999",
    "layer.*",
    "final,final",
    "encoder.decoder.layer.1",
    "layer.1e3",
    "layer.3.0",
    "*",
    "layer.3.attn.head",
    "layer.3.attn.head.05",
    "layer.3.attn.head.-1",
    "layer.3.mlp.head.1",
    "layer.3.attn.neurons",
    "layer.3.mid.z",
    "layer.0.attn.head.1",
    "layer.3.head.1",
    "final.router",
]
NO_ADDRESS += ["", " ", "layer.3 ", "layer.3\n", "\x00", "\ud800"]
NO_ADDRESS += ["layer." + "9" * 5000, "x" * 1_000_000]


def test_what_is_no_address() -> None:
    for text in NO_ADDRESS:
        with pytest.raises(SiteError) as caught:
            Site.parse(text)
        assert len(str(caught.value)) < 300, text[:50]
        assert str(caught.value).isprintable(), text[:50]


def test_a_site_is_checked_when_made() -> None:
    wrong = [(-1,), (True,), (1.5,), ("3",), (10**6,), (3, "head"), (3, "", "middle")]
    for fields in wrong:
        with pytest.raises(SiteError):
            Site(*fields)  # type: ignore[arg-type]


PATTERNS: list[tuple[object, list[str]]] = [
    ("layer.3", ["layer.3"]),
    ("final", ["final"]),
    ("layer.*", [f"layer.{k}" for k in range(13)]),
    ("layer.*,final", [*(f"layer.{k}" for k in range(13)), "final"]),
    ("layer.3-5", ["layer.3", "layer.4", "layer.5"]),
    ("layer.-1", ["layer.12"]),
    ("layer.-3--1", ["layer.10", "layer.11", "layer.12"]),
    ("*.attn", [f"layer.{k}.attn" for k in range(1, 13)]),
    ("layer.2-3.mid", ["layer.2.mid", "layer.3.mid"]),
    ("layer.3.*", ["layer.3.attn", "layer.3.mid", "layer.3.mlp"]),
    ("*", names(tuple(sorted(GPT2)))),
    ("final, layer.3 ,layer.3", ["layer.3", "final"]),
    (
        ["layer.3", Site(2), "final,layer.0"],
        ["layer.0", "layer.2", "layer.3", "final"],
    ),
    (Site(3, "mlp"), ["layer.3.mlp"]),
    ("hidden_states[0]", ["layer.0"]),
    ("hidden_states[12]", ["final"]),
    ("hidden_states[-1]", ["final"]),
    ("blocks.4.hook_resid_post", ["layer.5"]),
    (
        "blocks.4.hook_mlp_out,blocks.4.hook_attn_out",
        ["layer.5.attn", "layer.5.mlp"],
    ),
]
IN_TWO_STACKS: list[tuple[object, list[str]]] = [
    ("layer.3", ["encoder.layer.3", "decoder.layer.3"]),
    ("layer.5", ["encoder.layer.5"]),
    ("layer.-1", ["encoder.layer.6", "decoder.layer.3"]),
    ("final", ["encoder.final", "decoder.final"]),
    ("decoder.final", ["decoder.final"]),
    ("layer.1.cross", ["decoder.layer.1.cross"]),
    (
        "decoder.*",
        names(tuple(sorted(site for site in T5 if site.stack == "decoder"))),
    ),
    ("encoder.*.attn", [f"encoder.layer.{k}.attn" for k in range(1, 7)]),
    ("hidden_states[3]", ["encoder.layer.3", "decoder.final"]),
    ("hidden_states[5]", ["encoder.layer.5"]),
    ("encoder_hidden_states[6]", ["encoder.final"]),
    ("decoder_hidden_states[0]", ["decoder.layer.0"]),
    ("encoder.5.hook_resid_post", ["encoder.layer.6"]),
    ("decoder.0.hook_resid_mid_cross", ["decoder.layer.1.mid"]),
    ("decoder.0.hook_cross_attn_out", ["decoder.layer.1.cross"]),
]


def test_patterns_select_what_they_name() -> None:
    for sites, cases in ((GPT2, PATTERNS), (T5, IN_TWO_STACKS)):
        for pattern, chosen in cases:
            assert names(select(pattern, sites)) == chosen, pattern


def test_final_beside_every_layer_is_taken_where_there_is_one() -> None:
    assert names(select("layer.*,final", BERT)) == [f"layer.{k}" for k in range(13)]
    assert names(select(["final", "layer.*"], BERT)) == [
        f"layer.{k}" for k in range(13)
    ]
    assert names(select("layer.*,final", [Site(None)])) == ["final"]
    with pytest.raises(SiteError, match=r"it has final. Choose one of those\.$"):
        select("layer.*", [Site(None)])
    with pytest.raises(SiteError, match=r"it has attn of some blocks"):
        select("layer.*,final", [Site(1, "attn")])
    for strict in ("final", "layer.3,final", "layer.*.attn,final"):
        with pytest.raises(
            SiteError, match=r"no final norm; its last state is 'layer\.12'"
        ):
            select(strict, BERT)


def test_a_final_norm_of_the_other_stack_is_one() -> None:
    stacks = [
        *(Site(k, stack="encoder") for k in range(2)),
        Site(None, stack="decoder"),
    ]
    with pytest.raises(SiteError, match=r"it has encoder\.layer\.0 to .*final"):
        select("encoder.final", stacks)


def test_a_wrong_site_names_the_nearest() -> None:
    with pytest.raises(SiteError) as caught:
        select("layer.40", stack_sites(12), owner="gpt2")
    said = (
        "No site 'layer.40' in gpt2: it has layer.0 to layer.12 and final. The last"
        " is 'layer.12'."
    )
    assert str(caught.value) == said
    with pytest.raises(SiteError, match=r"Did you mean 'layer.3.mlp'"):
        select("layer.3.mpl", GPT2)
    with pytest.raises(SiteError, match=r"Did you mean 'final'"):
        select("fianl", GPT2)
    with pytest.raises(SiteError, match=r"The last is 'decoder.layer.3'"):
        select("decoder.layer.40", T5)
    with pytest.raises(SiteError, match=r"Did you mean 'layer.3'"):
        select(3, GPT2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "item",
    ["layers.3", "layer3", "Layer.3", "layer_3", "block.3", "h.3", "layer[3]"],
)
def test_a_misspelt_layer_keeps_its_number(item: str) -> None:
    for take in (Site.parse, check_syntax, partial(select, sites=GPT2)):
        with pytest.raises(SiteError, match=r"Did you mean 'layer\.3'\?"):
            take(item)


NOTHING: list[object] = [
    "layer.13",
    "layer.3-13",
    "layer.7-3",
    "layer.-14",
    "layer.0.*",
    "layer.3.cross",
    "*.cross",
    "*.head",
    "layer.3-",
    "encoder.layer.3",
    "layer.--1",
    "layer.٣",
    "layer.9999999",
    "hidden_states[13]",
    "hidden_states[-14]",
    "hidden_states[]",
    "blocks.12.hook_resid_post",
    "blocks.1.hook_pattern",
    "**",
    "layer.3;layer.4",
    "ln_final.hook_normalized",
    "layer.3,",
    ",",
]
NOTHING += ["", " ", [], [""], [3.5], None, b"layer.3", "la yer.3", "\ud800"]
NOTHING += ["layer.3\x00", "*" * 100_000]


def test_patterns_that_match_nothing() -> None:
    for pattern in NOTHING:
        with pytest.raises(SiteError) as caught:
            select(pattern, GPT2)
        assert len(str(caught.value)) < 400, pattern


def test_no_sites_at_all() -> None:
    for pattern in ("*", "layer.3", "hidden_states[0]", "final"):
        with pytest.raises(SiteError):
            select(pattern, [])


def test_some_of_a_models_sites() -> None:
    some = [Site(0), Site(4), Site(8), Site(None)]
    assert names(select("layer.3-8", some)) == ["layer.4", "layer.8"]
    assert names(select("hidden_states[8]", some, depth=12, final=True)) == ["layer.8"]
    assert names(select("hidden_states[12]", some, depth=12, final=True)) == ["final"]
    with pytest.raises(SiteError):
        select("layer.-1", some, depth=12, final=True)
    # The raw last layer is not hidden_states[12].
    with pytest.raises(SiteError, match=r"it has layer.0, layer.12"):
        select("hidden_states[12]", [Site(0), Site(12)], depth=12, final=True)


PATTERN = st.one_of(
    st.sampled_from(sorted(map(str, GPT2))),
    st.sampled_from(
        [
            "layer.*",
            "*",
            "*.attn",
            "layer.3.*",
            "layer.2-5",
            "layer.-1",
            "hidden_states[3]",
            "final",
        ]
    ),
)


@settings(deadline=None)
@given(st.lists(PATTERN, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_select_is_idempotent_and_blind_to_order(
    patterns: list[str], shuffler: random.Random
) -> None:
    chosen = select(patterns, GPT2)
    assert select(chosen, GPT2) == chosen == select(",".join(patterns), GPT2)
    assert list(chosen) == sorted(set(chosen))
    sites = GPT2.copy()
    shuffler.shuffle(sites)
    shuffler.shuffle(patterns)
    assert select(patterns, sites) == chosen


@settings(deadline=None)
@given(st.text())
def test_any_text_selects_or_raises_ours(text: str) -> None:
    with contextlib.suppress(SiteError):
        assert select(text, GPT2)


@settings(deadline=None)
@given(
    st.integers(1, 6),
    st.booleans(),
    STACKS,
    st.sampled_from(["hidden_states", "transformer_lens"]),
)
def test_aliases_come_back(
    depth: int, final: bool, stack: str | None, kind: str
) -> None:
    named = 0
    for site in stack_sites(depth, final=final, parts=PARTS, stack=stack):
        alias = to_alias(site, kind, depth=depth, final=final)  # type: ignore[arg-type]
        if alias is not None:
            named += 1
            assert from_alias(alias, depth=depth, final=final) == site
            assert select(
                alias, stack_sites(depth, final=final, parts=PARTS, stack=stack)
            ) == (site,)
    assert named >= depth + 1


def test_the_normed_last_entry() -> None:
    assert to_alias(Site(12), "hidden_states", depth=12, final=True) is None
    assert (
        to_alias(Site(12), "hidden_states", depth=12, final=False)
        == "hidden_states[12]"
    )
    assert (
        to_alias(Site(None), "hidden_states", depth=12, final=True)
        == "hidden_states[12]"
    )
    assert to_alias(Site(None), "transformer_lens", depth=12, final=True) is None
    assert to_alias(Site(None), "hidden_states", depth=12, final=False) is None
    assert to_alias(Site(13), "hidden_states", depth=12, final=True) is None
    assert to_alias(Site(3, "mlp"), "hidden_states", depth=12, final=True) is None
    assert from_alias("blocks.0.hook_resid_pre", depth=12, final=True) == Site(0)
    assert from_alias("blocks.7.hook_resid_pre", depth=12, final=True) == Site(7)
    with pytest.raises(SiteError, match="before the norm's own weight"):
        from_alias("ln_final.hook_normalized", depth=12, final=True)
    with pytest.raises(SiteError):
        to_alias(Site(3), "nnsight", depth=12, final=True)  # type: ignore[arg-type]


def test_transformer_lens_names_of_post_norm_blocks() -> None:
    assert from_alias(
        "blocks.3.hook_normalized_resid_post", depth=12, final=False
    ) == Site(4)
    with pytest.raises(SiteError, match="before the block's own norm"):
        from_alias("blocks.3.hook_resid_post", depth=12, final=False)
    with pytest.raises(SiteError):
        # Before cross-attention: no state of ours.
        from_alias("decoder.3.hook_resid_mid", depth=12, final=True)


def test_summaries() -> None:
    assert summarise(GPT2) == "layer.0 to layer.12 with attn, mid, mlp inside and final"
    assert summarise([Site(3, "mlp")]) == "mlp of some blocks"
    assert summarise([]) == "no sites"
    assert (
        summarise(stack_sites(2, stack="encoder") + stack_sites(1, stack="decoder"))
        == "encoder.layer.0 to encoder.layer.2 and encoder.final; decoder.layer.0 to"
        " decoder.layer.1 and decoder.final"
    )


# Sites inside attention and the MLP.


def _with_inner(blocks=2, heads=3):
    sites = [Site(0)]
    for layer in range(1, blocks + 1):
        sites += [Site(layer), Site(layer, "attn"), Site(layer, "mlp")]
        sites += [Site(layer, f"attn.{name}") for name in "qkvz"]
        sites += [Site(layer, f"attn.head.{head}") for head in range(heads)]
        sites += [Site(layer, "mlp.neurons"), Site(layer, "router")]
        sites.append(Site(layer, "mlp.input"))
    return [*sites, Site(None)]


INNER = [
    "layer.3.attn.head.5",
    "layer.3.attn.q",
    "decoder.layer.2.cross.z",
    "decoder.layer.2.cross.head.0",
    "layer.3.mlp.input",
    "layer.3.mlp.neurons",
    "layer.3.mlp.neuron.1535",
    "layer.3.router",
]


def test_an_inner_site_prints_as_it_was_parsed():
    for name in INNER:
        site = Site.parse(name)
        assert str(site) == name
        assert site.is_inner
        assert Site(site.layer, site.part, site.stack) == site


def test_plain_patterns_select_nothing_inside_attention_or_mlp():
    sites = _with_inner()
    outside = [site for site in sites if not site.is_inner]
    for pattern in ("*", "layer.*", "layer.1.*", "*.attn", "layer.*.mlp", "layer.1"):
        assert select(pattern, sites) == select(pattern, outside)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("*.attn.head.*", 6),
        ("layer.1.attn.head.*", 3),
        ("layer.*.attn.head.0-1", 4),
        ("layer.1-2.attn.head.2", 2),
        ("*.attn.z", 2),
        ("layer.-1.attn.q", 1),
        ("*.router", 2),
        ("*.mlp.neurons, *.attn.v", 4),
        ("*.mlp.input", 2),
    ],
)
def test_inner_patterns_select_what_they_name(pattern, count):
    selected = select(pattern, _with_inner())
    assert len(selected) == count
    assert all(site.is_inner for site in selected)


def test_inner_sites_sort_in_the_order_of_the_pass():
    names = [
        "attn.q",
        "attn.k",
        "attn.v",
        "attn.z",
        "attn.head.2",
        "attn.head.10",
        "attn",
    ]
    names += ["mid", "mlp.input", "router", "mlp.neurons", "mlp.neuron.3", "mlp"]
    sites = [Site(4, name) for name in names]
    assert sorted(reversed(sites)) == sites
    assert sites[-1] < Site(4)


def test_a_head_that_is_not_there_is_refused_with_the_number_of_heads():
    with pytest.raises(SiteError, match=r"3 heads there, counted from 0.*head\.2"):
        select("layer.1.attn.head.3", _with_inner())


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("blocks.1.attn.hook_z", "layer.2.attn.z"),
        ("blocks.1.attn.hook_v", "layer.2.attn.v"),
        ("blocks.1.mlp.hook_post", "layer.2.mlp.neurons"),
        ("blocks.1.mlp.hook_in", "layer.2.mlp.input"),
        ("decoder.1.cross_attn.hook_z", "decoder.layer.2.cross.z"),
    ],
)
@pytest.mark.parametrize("final", [True, False])
def test_inner_sites_have_the_names_of_transformer_lens(name, site, final):
    inner = from_alias(name, depth=2, final=final)
    assert str(inner) == site
    assert to_alias(inner, "transformer_lens", depth=2, final=final) == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("blocks.1.attn.hook_q", r"before rotary positions.*'layer\.2\.attn\.q'"),
        ("blocks.1.attn.hook_result", r"'layer\.2\.attn\.head\.\*'"),
        ("blocks.1.attn.hook_pattern", r"hs\.attention"),
        ("blocks.1.ln2.hook_normalized", r"'layer\.2\.mlp\.input'"),
    ],
)
def test_hooks_of_transformer_lens_that_are_no_site_say_what_to_take(name, said):
    with pytest.raises(SiteError, match=said):
        from_alias(name, depth=2, final=True)


def test_many_inner_sites_are_described_in_a_phrase():
    sites = [site for site in _with_inner() if site.is_inner]
    phrase = summarise(sites)
    assert "6 attn.heads of layer.1 to layer.2" in phrase
    assert "mlp.neurons of layer.1 to layer.2" in phrase


def test_a_layer_beyond_the_last_names_the_last_of_its_stack() -> None:
    for item, last in (
        ("encoder.layer.40", "encoder.layer.6"),
        ("decoder.layer.7", "decoder.layer.3"),
    ):
        with pytest.raises(SiteError, match=f"The last is '{last}'"):
            select(item, T5)
