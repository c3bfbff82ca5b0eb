"""Does a state serve the next token, or later ones?

    python examples/future.py

Of each of 200 film reviews a token is drawn. For its states at all layers the script
measures what they do to the prediction at that token and to those of the next 32: by
the gradient of the log-probability (`logit`), and by replacing the state, by the mean
of its site (`mean`) or by that of another review (`resample`). The same is done for a
copy with random weights. That takes two slow cores an hour or two, and a GPU four
minutes: `--device cuda`. `--quick` gives a first look.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from one_state import draw_one_state
from over_texts import first_tokens
from reviews import reviews

import hiddenscope as hs
from hiddenscope.results import views_of
from hiddenscope.views.figures.pages import image

SENTENCE = "It is done, and submitted. You can play “Survival of the Tastiest"
LAYER, POSITION = 5, 10
MEASURES = ("logit", "mean", "resample")
WORDS = {
    "logit": "gradient (logit)",
    "mean": "replaced by the mean",
    "resample": "replaced by another text's",
}
COLORS = {"logit": "#0072b2", "mean": "#009e73", "resample": "#c8553d"}
HALF = 0.5
TOKENS = 64
QUICK_TOKENS = 16


def main() -> None:
    """Look at one state of a sentence, then ahead from states of many texts."""
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    model = hs.load(options.model, device=options.device)
    layers = model.anatomy.stacks[-1].depth
    sentences = [str(model)]

    sites = [0, layers // 2, layers] if options.quick else range(layers + 1)
    shown = ",".join(f"layer.{layer}" for layer in sorted({*sites, LAYER}))
    one_text = hs.visibility(model, SENTENCE, sites=shown)
    names = one_text.data["site"].values.tolist()
    place = names.index(f"layer.{LAYER}")
    draw_one_state(one_text, options.out / "one-state.png", (place, POSITION))
    sentences.append(tell_of_one_state(one_text, place))

    texts = first_tokens(model, reviews(), options.texts, options.tokens)
    results = {}
    for measure in MEASURES:
        start = time.perf_counter()
        results[measure] = hs.visibility(
            model,
            texts,
            influence=measure,
            sites=options.sites,
            sampling=hs.Sampling(per_text=options.per_text, baseline="random"),
        )
        seconds = time.perf_counter() - start
        sentences += ["", f"influence={measure!r}", results[measure].summary()]
        sentences += tell_layers(results[measure])
        sentences.append(f"It took {seconds:,.0f} s.")
    report = "\n".join(sentences)
    print(report)
    write(results, report, options.out)


def tell_of_one_state(result: hs.Result, place: int) -> str:
    """Say how far the two quadrants of a state reach."""
    influence = result.data["l1"]
    names, strings = influence.site.values, result.data["string"].values
    on_state = influence.isel(site=place, token=POSITION)
    of_state = influence.isel(source_site=place, source_token=POSITION)
    # What a state does to itself is left out.
    below = on_state.isel(source_site=slice(0, place)).sum("source_site").values
    above = of_state.isel(site=slice(place + 1, None)).sum("site").values
    others = below[:POSITION].sum() / below.sum()
    later = above[POSITION + 1 :].sum() / above.sum()
    return (
        f"One state: {names[place]} at {str(strings[POSITION])!r}, token {POSITION} of"
        f" {len(strings)}. Of the influence of lower states on it, {others:.0%}"
        " comes from earlier tokens; of its influence on the states above,"
        f" {later:.0%} goes to later tokens."
    )


def tell_layers(result: hs.Result) -> list[str]:
    """Say the share of later predictions at some layers, with random weights beside."""
    sentences = []
    sites = result.data["source_site"].values
    step = max(1, len(sites) // 10)
    for name in ("future", "size_future"):
        if name not in result.data:
            continue
        for whose in ("", "random_"):
            values = []
            for row in range(0, len(sites), step):
                middle, low, high = (
                    float(result.data[f"{whose}{name}{end}"].values[row])
                    for end in ("", "_low", "_high")
                )
                share = "no share"
                if np.isfinite(low):
                    share = f"{middle:.2f} ({low:.2f} to {high:.2f})"
                values.append(f"{sites[row]} {share}")
            sentences.append(f"{whose}{name}: {', '.join(values)}")
    effects = result.data["outgoing"].values
    unit = result.data["outgoing"].attrs["units"]
    values = []
    for row in range(0, len(sites), step):
        later = effects[row, 1:].sum()
        values.append(f"{sites[row]} {effects[row, 0]:.2f} and {later:.2f}")
    sentences.append(f"own and later effect in {unit}: {', '.join(values)}")
    within = effects[0, 1:].cumsum() / effects[0, 1:].sum()
    sentences.append(
        f"Of the later effect of {sites[0]}, {within[1]:.0%} lies within two tokens,"
        f" and half within {int((within < HALF).sum()) + 1}."
    )
    correlations = result.data["together"].values[:-2]
    sentences.append(
        f"rank correlations by site: {np.nanmin(correlations):.2f} to"
        f" {np.nanmax(correlations):.2f}"
    )
    return sentences


def write(results: dict[str, hs.Result], report: str, out: Path) -> None:
    """Write the findings and the pictures."""
    (out / "findings.txt").write_text(report + "\n", encoding="utf-8")
    facts = {measure: result.facts for measure, result in results.items()}
    numbers = {}
    for measure, result in results.items():
        numbers[measure] = {}
        for name, values in result.data.data_vars.items():
            numbers[measure][name] = values.values.round(4).tolist()
    findings = json.dumps({"facts": facts, "numbers": numbers}, indent=1)
    (out / "findings.json").write_text(findings.replace("NaN", "null") + "\n")
    sites = [str(site) for site in results["logit"].data["source_site"].values]
    draw_by_layer(numbers, sites, out / "by-layer.png")
    for measure, result in results.items():
        _, by_distance, *_ = views_of(result)
        picture = image((by_distance,), ".png", dpi=90)
        (out / f"by-distance-{measure}.png").write_bytes(picture)


def draw_by_layer(numbers: dict[str, dict], sites: list[str], path: Path) -> None:
    """Draw the shares of later predictions along the layers, with random weights."""
    import matplotlib.pyplot as plt

    # A gradient's norm and a size have no sign, so that nothing cancels in them.
    panels = {
        "gradient, and size of the change of the loss": (MEASURES, "size_future"),
        "rise of the loss, in which ups and downs cancel": (MEASURES[1:], "future"),
    }
    figure, axes = plt.subplots(
        1, 2, figsize=(9, 3.9), sharey=True, layout="constrained"
    )
    places = range(len(sites))
    for axis, (title, (measures, name)) in zip(axes, panels.items(), strict=True):
        axis.axhline(HALF, color="#999999", linewidth=0.8, linestyle=":")
        for measure in measures:
            values = numbers[measure]
            share = name if name in values else "future"
            for whose, line in (("", "-"), ("random_", (0, (3, 2)))):
                middle, low, high = (
                    np.array(values[f"{whose}{share}{end}"], float)
                    for end in ("", "_low", "_high")
                )
                color = COLORS[measure]
                axis.plot(places, middle, color=color, linestyle=line)
                axis.fill_between(places, low, high, color=color, alpha=0.16, lw=0)
        axis.set_title(title, fontsize=9)
        axis.set_ylim(-0.05, 1.03)
        shown = list(places)[:: max(1, len(sites) // 6)]
        axis.set_xticks(shown, [sites[place] for place in shown])
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("share of later predictions", fontsize=9)
    for measure, words in WORDS.items():
        axes[1].plot([], color=COLORS[measure], label=words)
    axes[1].plot([], color="#666666", linestyle=(0, (3, 2)), label="random weights")
    axes[1].fill_between([], [], color="#666666", alpha=0.3, label="95% interval")
    axes[1].legend(fontsize=8, frameon=False, loc="upper right")
    figure.savefig(path, dpi=95)
    plt.close(figure)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", help="such as cuda; by default the CPU")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--per-text", type=int, default=1, help="tokens of each text")
    parser.add_argument("--sites", default="layer.*,final")
    parser.add_argument("--quick", action="store_true", help="a minute")
    parser.add_argument("--out", type=Path, default=Path("out/future"))
    options = parser.parse_args()
    if options.quick:
        options.texts = 5
        options.tokens = QUICK_TOKENS
        options.sites = "layer.0,layer.10,layer.20,layer.29,layer.30,final"
    return options


if __name__ == "__main__":
    main()
