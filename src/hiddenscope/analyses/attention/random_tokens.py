"""Random tokens: texts in which nothing but position and repetition tells tokens apart.

A text is the first token as the tokenizer puts it, and then two runs of random tokens.
In half of the texts the second run repeats the first.
"""

from dataclasses import dataclass

import numpy as np

from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.states.arrays import Ints

# Tokens of a run.
RUN = 24
FEWEST = 4
# Some columns are below zero in every draw, such as a small weight less a half. So the
# opposite signs count too, and the smallest p is 2 of 32 for five draws, of 64 for six.
FEWEST_DRAWS = 6


@dataclass(frozen=True)
class RandomTexts:
    """Texts of random tokens: `draws` of them without a repetition, and then as many
    with one, if a repetition can be read.

    `start` is the position of the first random token, and `run` the length of a run.
    """

    inputs: Inputs
    draws: int
    start: int
    run: int
    repeats: bool


def draw_texts(
    model: Model, stack: str | None, draws: int, seed: int, *, causal: bool
) -> RandomTexts | None:
    """Draw texts for a stack; None where the model takes only shorter ones."""
    encoder = model.text_encoder
    with model.lock:
        before, after = encoder.frame()
        ordinary = np.array(encoder.ordinary_ids())
    is_target = model.encoder_decoder and stack == "decoder"
    window = encoder.window
    source_frame = before, after
    if is_target:
        before = [] if encoder.start is None else [encoder.start]
        window = encoder.target_window or encoder.window
    if causal:
        # A decoder never sees what would come after its text.
        after = []
    run = RUN
    if window is not None:
        run = min(run, (window - len(before) - len(after)) // 2)
    run = min(run, len(ordinary) // 2)
    if run < FEWEST:
        return None
    generator = np.random.default_rng(seed)
    # No token comes twice by chance, so that a repetition is the only one.
    different, repeated = [], []
    for _ in range(draws):
        tokens: Ints = generator.choice(ordinary, 2 * run, replace=False)
        first = tokens[:run].tolist()
        second = tokens[run:].tolist()
        different.append((*before, *first, *second, *after))
        repeated.append((*before, *first, *first, *after))
    texts = different
    if causal:
        texts = different + repeated
    inputs = Inputs(tuple(texts))
    if is_target:
        sources = []
        for _ in texts:
            tokens = generator.choice(ordinary, run, replace=False)
            sources.append((*source_frame[0], *tokens.tolist(), *source_frame[1]))
        inputs = Inputs(tuple(sources), targets=inputs)
    return RandomTexts(inputs, draws, len(before), run, repeats=causal)
