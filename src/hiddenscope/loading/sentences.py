"""How a folder of sentence-transformers makes a vector of a text.

    modules.json                          its modules, in order: Transformer, Pooling, Normalize, ...
    sentence_bert_config.json             the longest text in tokens, and whether texts are lower-cased
    1_Pooling/config.json                 how the states of a text become one vector
    config_sentence_transformers.json     what is put before a text

`hs.embed` does the same, or says that it cannot.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiddenscope.errors import Damaged

MODULES, CONFIG = "modules.json", "config_sentence_transformers.json"
TRANSFORMERS = "sentence_*_config.json"  # bert, roberta, distilbert, xlm-roberta, ...
# Theirs, and what hs.embed calls them.
POOLS = {
    "mean": "mean",
    "max": "max",
    "cls": "first",
    "lasttoken": "last",
}
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
WITHOUT_EFFECT = (
    "Transformer",
    "Pooling",
    "Normalize",
    "Dropout",
)  # on what hs.embed returns; norm 1 is its own choice
_LARGEST = 2**20


@dataclass(frozen=True)
class SentenceModules:
    """What sentence-transformers would do with a text, as far as it changes the vector.

    `longest` is in tokens; `prompt` is put before every text, and `prompts` names those
    that a caller may choose; `pool` is what `hs.embed` calls the pooling; `missing`
    says what it does not do.
    """

    longest: int | None = None
    lower: bool = False
    prompt: str = ""
    prompts: tuple[str, ...] = ()
    pool: str = "mean"
    missing: str = ""


def sentence_modules(folder: Path) -> SentenceModules | None:
    """What the files of a folder say; None for a folder that is not of
    sentence-transformers.

    >>> sentence_modules(Path("/nowhere")) is None
    True
    """
    transformers = sorted(folder.glob(TRANSFORMERS))
    if not transformers and not (folder / MODULES).is_file():
        return None
    own = _json(transformers[0], dict) if transformers else {}
    longest = own.get("max_seq_length")
    if longest is not None and (
        not isinstance(longest, int) or isinstance(longest, bool) or longest < 1
    ):
        raise _damaged(transformers[0], f"max_seq_length is {str(longest)[:40]}")
    config = _json(folder / CONFIG, dict) if (folder / CONFIG).is_file() else {}
    prompts, chosen = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(
        isinstance(prompt, str) for prompt in prompts.values()
    ):
        raise _damaged(folder / CONFIG, "prompts is not an object of strings")
    prompt = prompts.get(chosen, "") if isinstance(chosen, str) else ""
    pooling, missing = _modules(folder)
    modes = _modes(pooling)
    if [mode for mode in modes if mode not in POOLS] or len(modes) > 1:
        missing = missing or f"pools by {' and '.join(modes)[:80]}"
    elif prompt and pooling.get("include_prompt") is False:
        missing = missing or "leaves the prompt out of the mean"
    others = tuple(name for name, text in prompts.items() if text and name != chosen)
    pool = POOLS.get(modes[0], "mean")
    return SentenceModules(
        longest, bool(own.get("do_lower_case")), prompt, others, pool, missing
    )


def _modules(folder: Path) -> tuple[dict[str, Any], str]:
    """The configuration of the pooling, and the first module that `hs.embed` does not
    have.
    """
    if not (folder / MODULES).is_file():
        return {}, ""
    pooling: dict[str, Any] = {}
    missing = ""
    for kind, path in _listed(folder):
        if kind == "Pooling" and (folder / path / "config.json").is_file():
            pooling = _json(folder / path / "config.json", dict)
        elif kind not in WITHOUT_EFFECT:
            missing = missing or f"has a module {kind[:40]}"
    return pooling, missing


def _listed(folder: Path) -> Iterator[tuple[str, str]]:
    """Each module's class, without the package it is in, and its folder, which lies in
    this one.
    """
    for module in _json(folder / MODULES, list):
        if not isinstance(module, dict) or not all(
            isinstance(module.get(key), str) for key in ("type", "path")
        ):
            raise _damaged(folder / MODULES, "a module has no type or no path")
        if ".." in Path(module["path"]).parts or Path(module["path"]).is_absolute():
            raise _damaged(
                folder / MODULES, f"{module['path'][:80]!r} lies outside the folder"
            )
        yield module["type"].rpartition(".")[2], module["path"]


def _modes(pooling: dict[str, Any]) -> list[str]:
    """How states are pooled, in the words of sentence-transformers; several are put
    side by side.
    """
    named = pooling.get("pooling_mode")
    if named is None:
        named = [mode for key, mode in MODES.items() if pooling.get(key)] or ["mean"]
    return [str(mode) for mode in (named if isinstance(named, list) else [named])] or [
        "mean"
    ]


def _json(path: Path, kind: type[Any]) -> Any:
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"it has {path.stat().st_size:,} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON ({error})"[:200]) from error
    if not isinstance(content, kind):
        raise _damaged(path, f"it is a {type(content).__name__}")
    return content


def _damaged(path: Path, reason: str) -> Damaged:
    return Damaged(
        f"Cannot read {path}", reason, "Download the file again, or remove it."
    )
