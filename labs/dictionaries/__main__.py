"""Train dictionaries, plant faults in them, and count what the proof says to each."""

import argparse
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import hiddenscope as hs
from hiddenscope.directions.dictionary import Dictionary
from hiddenscope.directions.proof import prove
from hiddenscope.errors import FileError, StatesError
from hiddenscope.model import Model
from hiddenscope.states import States
from hiddenscope.testing import tiny_model
from labs.dictionaries.planted import PARTS, faults, misplaced
from labs.dictionaries.train import KINDS, train

PAGE = Path(__file__).parents[2] / "docs" / "directions.md"
SOUND = "sound"
TOKENS = 128
COUNT = 96
STEPS = 120


def sequences(count: int, seed: int) -> list[list[int]]:
    """Return random tokens, of which few are frequent."""
    chances = 1 / np.arange(1, TOKENS + 1)
    chance = np.random.default_rng(seed)
    rows: list[list[int]] = chance.choice(
        TOKENS, (count, 16), p=chances / chances.sum()
    ).tolist()
    return rows


def verdict(make: Callable[[], Dictionary], model: Model, named: str) -> str:
    """Return what is said to it: accepted, refused, or refused with the right name."""
    try:
        prove([make()], model, sequences(40, 2))
    except (FileError, StatesError) as error:
        return "named" if named and re.search(named, str(error)) else "refused"
    return "accepted"


def table(verdicts: Counter[tuple[str, str]]) -> str:
    """Return the counts of each case as a table."""
    lines = [
        "| dictionary | accepted | refused, what fits is named | refused otherwise |"
    ]
    lines.append("|---|---|---|---|")
    for name in dict.fromkeys(name for name, _ in verdicts):
        counts = [verdicts[name, word] for word in ("accepted", "named", "refused")]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def _rows(model: Model, site: str) -> Tensor:
    states = model.capture(sequences(200, 1), site)
    assert isinstance(states, States)
    return states[site][torch.from_numpy(states.tokens.positions > 0)]


def of_seed(seed: int) -> Counter[tuple[str, str]]:
    """Train one dictionary of each activation, and count what is said to it."""
    torch.set_num_threads(1)
    model = hs.load((tiny_model("llama"), None))
    rows = _rows(model, "layer.2")
    verdicts: Counter[tuple[str, str]] = Counter()
    for kind in KINDS:
        sound = train(rows, kind, COUNT, steps=STEPS, seed=seed)
        verdicts[SOUND, verdict(partial(replace, sound), model, "")] += 1
        bare = train(rows, kind, COUNT, steps=STEPS, biased=False, seed=seed)
        case = f"{SOUND}, without a bias of the decoder"
        verdicts[case, verdict(partial(replace, bare), model, "")] += 1
        # Faults are planted in every fourth.
        planted = {} if seed % 4 else faults(sound) | misplaced()
        for name, fault in planted.items():
            case = f"{name} ({kind})" if "ReLU" in name else name
            make = partial(fault.plant, sound)
            verdicts[case, verdict(make, model, fault.named)] += 1
    # Those of a part that are called the layer, and as they are.
    for part in () if seed % 4 else PARTS:
        site = f"layer.2.{part}"
        inside = train(_rows(model, site), "topk", COUNT, steps=STEPS, seed=seed)
        case = f"the layer's {part}, called the layer"
        named = verdict(partial(replace, inside), model, f"; at {site}, ")
        verdicts[case, named] += 1
        sound = partial(replace, inside, reads=site, writes=site)
        verdicts[f"{SOUND}, at {part}", verdict(sound, model, "")] += 1
        case = f"{SOUND}, from {part} to mlp"
        if part != "mlp":
            ends = _rows(model, site), _rows(model, "layer.2.mlp")
            across = train(ends[0], "topk", COUNT, outputs=ends[1], seed=seed)
            sound = partial(replace, across, reads=site)
            verdicts[case, verdict(sound, model, "")] += 1
    # A dictionary before its training, which knows nothing of these states.
    fresh = train(rows, "topk", COUNT, steps=0, seed=seed)
    verdicts["untrained", verdict(partial(replace, fresh), model, "are shuffled")] += 1
    return verdicts


def main() -> None:
    """Run every seed, print the table, and with --write put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40, help="of each activation")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    options = parser.parse_args()
    verdicts: Counter[tuple[str, str]] = Counter()
    seeds = range(options.first, options.first + options.seeds)
    with Pool(options.processes) as pool:
        for counts in pool.imap(of_seed, seeds):
            verdicts += counts
            print(table(verdicts), flush=True)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        fresh_page = re.sub(
            r"(?<=<!-- verdicts -->\n).*?(?=\n<!-- end -->)",
            table(verdicts),
            page,
            flags=re.DOTALL,
        )
        PAGE.write_text(fresh_page, encoding="utf-8")


if __name__ == "__main__":
    main()
