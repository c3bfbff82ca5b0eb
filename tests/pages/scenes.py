"""Views to look at and to test: numbers like those that analyses find, and strings that
nobody should trust.
"""

import numpy as np

from hiddenscope.results.pictures import (
    Graph,
    Grid,
    Lines,
    Measure,
    Panels,
    Series,
    View,
    Words,
)

FRANCE = ("The", " capital", " of", " France", " is", " Paris", ".")
GERMANY = ("The", " capital", " of", " Germany", " is", " Berlin", ".")
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<!-- <script>",
    "<img src=x onerror='window.hacked = 1'>",
    "line\u2028end",
    "abc\u202e\u2066evil\u2069",
    "nul\0nul",
    "lone\ud83d",
    "=HYPERLINK(1)",
    "-1+1",
    "@SUM(1)",
    "\tTAB\r\n",
    "𝕏" * 250_000,  # a megabyte
    "e\u0301\u0301\u0301 مرحبا 你好 👩‍🔬",
    "",
)


def sites(depth: int) -> tuple[str, ...]:
    return (*(f"layer.{k}" for k in range(depth + 1)), "final")


def norms(depth: int = 30, tokens: tuple[str, ...] = FRANCE) -> Grid:
    """Norms as smollm2 has them: the first token is huge in the middle."""
    layer = np.arange(depth + 2)[:, None]
    noise = np.random.default_rng(0).uniform(0.9, 1.1, (depth + 2, len(tokens)))
    values = 20 * 1.08**layer * noise
    values[3:depth, 0] = 22_000
    values[-1] = 30
    return Grid(
        "Norms",
        sites(depth),
        tokens,
        (Measure("norm", values, unit="L2", scale="log"),),
    )


def words() -> Grid:
    """The lens: words in the cells."""
    random = np.random.default_rng(1)
    shape = (14, 7)
    vocabulary = [" the", " a", " city", " Paris", " France", "\n", " of", "<b>"]
    vocabulary += [" unbelievable", " London"]
    strings = random.choice(np.array(vocabulary), (*shape, 3)).astype(object)
    chances = random.dirichlet(np.ones(6), shape).astype(np.float32)
    probability = np.sort(chances, axis=-1)[..., ::-1][..., :3]
    measures = (
        Measure("probability", probability[..., 0], limits=(0, 1)),
        Measure("entropy", random.uniform(0, 8, shape), unit="nats", scale="log"),
    )
    return Grid(
        "What each layer would say",
        sites(12),
        FRANCE,
        measures,
        words=Words.of(strings, probability),
    )


def influence(depth: int, count: int) -> np.ndarray:
    """A causal map: a state is moved by states below it, at its token and before."""
    layer, token = np.arange(depth), np.arange(count)
    down = layer[:, None, None, None] - layer[None, None, :, None]
    back = token[None, :, None, None] - token[None, None, None, :]
    noise = np.random.default_rng(2).lognormal(0, 0.5, (depth, count, depth, count))
    cone = (down >= 0) & (back >= 0) & ((down > 0) | (back == 0))
    return np.where(
        cone, noise * np.exp(-0.25 * down - 0.5 * back) * (1 + (back == 0)), 0
    ).astype(np.float32)


def visibility(depth: int = 14, tokens: tuple[str, ...] = FRANCE) -> Grid:
    measure = Measure("influence", scale="log", influence=influence(depth, len(tokens)))
    return Grid(
        "What can a state see?",
        sites(depth - 2),
        tokens,
        (measure,),
        note="Influence of states on one another.",
    )


def comparison() -> Grid:
    """Two texts, aligned, with a gap."""
    first = ("The", " capital", " of", " France", None, " is", " Paris", ".")
    second = ("The", " capital", " of", " West", " Germany", " is", " Bonn", ".")
    values = (
        np.abs(np.random.default_rng(3).normal(size=(14, 8))) * np.arange(14)[:, None]
    )
    values[:, :3] = 0
    values[:, 4] = np.nan
    signed = np.random.default_rng(4).normal(size=(14, 8))
    signed[:, 4] = np.nan
    measures = (
        Measure("distance", values, unit="L2"),
        Measure("mean difference", signed, meaning="diverging"),
    )
    return Grid("France against Germany", sites(12), first, measures, second=second)


def panels(count: int = 3, points: int = 50) -> Panels:
    random = np.random.default_rng(5)
    label = np.arange(points) % 2
    side = np.where(label, 1.0, -1.0)[None, :, None] * np.array([0.5, 0.3])
    places = np.cumsum(random.normal(size=(count, points, 2)) * 0.4, axis=0)
    places += np.linspace(0, 4, count)[:, None, None] * side
    places += random.normal(size=(1, points, 2))
    names = [*(f"layer.{k}" for k in range(count - 1)), "final"]
    messages = ["All states are equal here.", *[""] * (count - 1)]
    captions = [f"silhouette {k / 50:.2f}, p {0.5 / (k + 1):.3f}" for k in range(count)]
    return Panels(
        "Toronto and Montreal",
        tuple(names),
        places,
        labels=tuple("Toronto" if one else "Montreal" for one in label),
        texts=tuple(f"Sentence {k} about a city on the lake" for k in range(points)),
        captions=tuple(captions),
        messages=tuple(messages),
    )


def lines() -> Lines:
    x = sites(30)
    rise = 1 / (1 + np.exp(-(np.arange(32) - 16) / 4))
    score = 0.5 + 0.45 * rise, 0.44 + 0.45 * rise, 0.55 + 0.44 * rise
    accuracy = Series("accuracy", *score, "95% interval")
    null = (np.full(32, level) for level in (0.5, 0.42, 0.58))
    chance = Series("shuffled labels", *null, "null", style="dash")
    gap = 0.3 * rise
    gap[10:12] = np.nan
    bars = Series("selectivity", gap, style="bar")
    return Lines("Probes by layer", x, (accuracy, chance, bars), y_name="accuracy")


def graph(layers: int = 30, heads: int = 9, count: int = 40) -> Graph:
    """The strongest edges of a model, some of which were measured exactly."""
    random = np.random.default_rng(7)
    edges: dict[tuple[str, str, str], float] = {}
    reader, layer = "logits", layers + 1
    while len(edges) < count:
        below = max(0, layer - 1 - int(random.exponential(6)))
        writer = f"layer.{below}.attn.head.{random.integers(heads)}"
        if random.random() < 0.45:
            writer = f"layer.{below}.mlp"
        if below == 0:
            writer = "layer.0"
        kind = "qkv"[random.integers(3)] if "head" in reader else ""
        edges[writer, reader, kind] = random.normal() * random.lognormal(0, 0.7)
        # Most chains go on, so that parts are read and read others.
        reader, layer = writer, below
        if below == 0:
            reader, layer, _ = [
                ("logits", layers + 1, 0),
                ("layer.20.mlp", 20, 0),
                ("layer.12.attn.head.5", 12, 0),
            ][random.integers(3)]
    values = np.array([*edges.values()])
    return Graph.of(
        "Strongest edges",
        [(*ends, value) for ends, value in edges.items()],
        value_name="attribution",
        unit="logits",
        note="The 40 strongest of 43,112 edges.",
        exact=np.where(np.abs(values) > 0.5, 1.1 * values, np.nan),
    )


def long() -> Grid:
    text = ("It", " was", " the", " best", " of", " times", ",", "\n", " so", " long")
    return norms(38, (text * 52)[:512])


def hostile() -> list[View]:
    values = np.arange(2.0 * len(HOSTILE)).reshape(2, -1)
    said = np.array([[[one] for one in HOSTILE]] * 2, dtype=object)
    evil = HOSTILE[0]
    grid = Grid(
        evil,
        ("layer.0", "final"),
        HOSTILE,
        (Measure(evil, values, unit=evil),),
        words=Words.of(said),
        note=evil,
    )
    points = np.random.default_rng(6).normal(size=(2, len(HOSTILE), 2))
    around = (evil, evil), ("", evil), (evil, evil), evil
    scatter = Panels(evil, ("layer.0", evil), points, HOSTILE, HOSTILE, *around)
    numbers = [1.0, 2.0], [0.5, 1.0], [2.0, 3.0]
    series = tuple(Series(name, *numbers, name) for name in HOSTILE)
    names = evil, evil, evil
    return [grid, scatter, Lines(evil, (evil, "final"), series, *names, note=evil)]
