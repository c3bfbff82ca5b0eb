"""Reads: the tokens whose log-probabilities are read, and where in which texts."""

from collections.abc import Sequence
from dataclasses import dataclass

from hiddenscope.errors import PassError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, Texts, load_with_head

# Every sixth token of a masked language model's texts is masked, and read there.
MASKED = 6


@dataclass(frozen=True)
class Reads:
    """Texts, and for each the positions and tokens whose log-probabilities are read."""

    inputs: Inputs
    positions: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def count(self) -> int:
        """Return the number of positions."""
        return sum(map(len, self.positions))


def masked_model(model: Model) -> bool:
    """Tell whether it fills in masked tokens and does not continue a text."""
    return not model.anatomy.stacks[-1].causal


def check_head(model: Model) -> None:
    """Refuse a model without logits, and a masked language model without a mask."""
    problem = f"Cannot steer {model.name}"
    if not model.anatomy.makes_logits:
        raise PassError(
            problem,
            "it has no head, and makes no logits",
            load_with_head(model),
        )
    if masked_model(model) and _mask(model) is None:
        raise PassError(
            problem,
            "it is a masked language model, and its tokenizer has no mask token",
            "Load it with the tokenizer that has one.",
        )


def _mask(model: Model) -> int | None:
    mask = getattr(model.tokenizer, "mask_token_id", None)
    return mask if isinstance(mask, int) else None


def prompt_reads(model: Model, prompts: Inputs, answers: tuple[int, ...]) -> Reads:
    """Read the answers after each prompt, or at its mask token."""
    positions = []
    for number, ids in enumerate(prompts.ids):
        if prompts.targets is not None:
            position = len(prompts.targets.ids[number]) - 1
        elif masked_model(model):
            position = _mask_position(model, number, ids)
        else:
            position = len(ids) - 1
        positions.append((position,))
    return Reads(prompts, tuple(positions), ((answers,),) * len(prompts))


def _mask_position(model: Model, number: int, ids: Sequence[int]) -> int:
    mask = _mask(model)
    positions = [position for position, token in enumerate(ids) if token == mask]
    if len(positions) != 1:
        mask_token = getattr(model.tokenizer, "mask_token", "mask")
        raise TextError(
            f"Prompt {number} must have one mask token",
            f"it has {len(positions)}",
            f"Put one {mask_token} where the answer goes.",
        )
    return positions[0]


def quality_reads(model: Model, texts: Texts | Inputs) -> Reads:
    """Read every token of plain texts that the model can predict."""
    inputs = model.encode(texts)
    if inputs.targets is not None:
        reads = _second_halves(inputs, inputs.targets)
    elif masked_model(model):
        reads = _masked_tokens(model, inputs)
    else:
        positions = tuple(tuple(range(length - 1)) for length in inputs.lengths)
        tokens = tuple(_single(ids[1:]) for ids in inputs.ids)
        reads = Reads(inputs, positions, tokens)
    for number, text_positions in enumerate(reads.positions):
        if not text_positions:
            raise TextError(
                f"Cannot measure the perplexity of text {number}",
                "it has one token, and there is nothing to predict",
                "Give a longer text.",
            )
    return reads


def _second_halves(inputs: Inputs, targets: Inputs) -> Reads:
    """Let the encoder read half of each text and the decoder predict the rest."""
    firsts, decoder_inputs, positions, tokens = [], [], [], []
    for ids, start in zip(inputs.ids, targets.ids, strict=True):
        half = len(ids) // 2
        # A text of one token has nothing left to predict; it is refused later.
        rest = ids[half:] if half else ()
        firsts.append(ids[: max(half, 1)])
        decoder_inputs.append((start[0], *rest[:-1]))
        positions.append(tuple(range(len(rest))))
        tokens.append(_single(rest))
    split = Inputs(tuple(firsts), targets=Inputs(tuple(decoder_inputs)))
    return Reads(split, tuple(positions), tuple(tokens))


def _masked_tokens(model: Model, inputs: Inputs) -> Reads:
    """Mask every sixth token, from another position on in each text.

    Special tokens are not masked.
    """
    special = set(getattr(model.tokenizer, "all_special_ids", ()))
    mask = _mask(model)
    assert mask is not None
    masked_texts, positions, tokens = [], [], []
    for number, ids in enumerate(inputs.ids):
        words = [position for position, token in enumerate(ids) if token not in special]
        masked = words[number % MASKED :: MASKED] or words[:1]
        masked_ids = list(ids)
        for position in masked:
            masked_ids[position] = mask
        masked_texts.append(tuple(masked_ids))
        positions.append(tuple(masked))
        tokens.append(_single([ids[position] for position in masked]))
    return Reads(Inputs(tuple(masked_texts)), tuple(positions), tuple(tokens))


def _single(tokens: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return one token to read at each position."""
    return tuple((token,) for token in tokens)
