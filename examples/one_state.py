"""Draw one state of a map: what influences it, and what it influences."""

from pathlib import Path

import hiddenscope as hs


def draw_one_state(
    result: hs.Result, path: Path, state: tuple[int, int] | None = None
) -> None:
    """Draw both sides of a state: its place among the sites, and its token.

    Without one, it is the state in the middle of the map.
    """
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    influence = result.data[result.facts["measure"]]
    site, token = len(influence.site) // 2, len(influence.token) // 2
    if state is not None:
        site, token = state
    strings = [repr(str(string)) for string in result.data["string"].values]
    name = f"{influence.site.values[site]} at {strings[token]}"
    on_state = influence.isel(site=site, token=token)
    of_state = influence.isel(source_site=site, source_token=token)
    pictures = {
        f"What influences {name}": (on_state, "Blues"),
        f"What {name} influences": (of_state, "Oranges"),
    }
    width = max(5.0, 0.42 * len(strings))
    figure, axes = plt.subplots(2, 1, figsize=(width, 8), layout="constrained")
    for axis, (title, (values, colors)) in zip(axes, pictures.items(), strict=True):
        # What a state does to itself is 0 or larger than all else.
        numbers = values.to_numpy().copy()
        numbers[site, token] = 0
        # White is what has no influence; the least influence is somewhat darker.
        least = numbers[numbers > 0].min()
        norm = LogNorm(least / 3, numbers.max())
        image = axis.imshow(
            numbers, norm=norm, cmap=colors, origin="lower", aspect="auto"
        )
        axis.plot(token, site, "s", color="black")
        axis.set_title(title)
        axis.set_xticks(range(len(strings)), strings, rotation=30, ha="right")
        some_sites = range(0, len(influence.site), 5)
        axis.set_yticks(some_sites, influence.site.values[some_sites])
        figure.colorbar(image, ax=axis, label="influence")
    figure.savefig(path, dpi=110)
    plt.close(figure)
