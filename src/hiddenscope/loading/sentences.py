"""Read how a sentence-transformers folder turns a text into a vector.

    modules.json                        Transformer, Pooling, Normalize, ... in order
    sentence_bert_config.json           longest text in tokens, lower-casing
    1_Pooling/config.json               how the states become one vector
    config_sentence_transformers.json   prompts that are put before a text

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
# Pooling names of sentence-transformers, and what hs.embed calls them.
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
# Modules that hs.embed covers; whether vectors have norm 1 is its caller's choice.
SUPPORTED = ("Transformer", "Pooling", "Normalize", "Dropout")
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
    """Read the modules of a folder; return None if it lists none.

    >>> sentence_modules(Path("/nowhere")) is None
    True
    """
    transformers = sorted(folder.glob(TRANSFORMERS))
    if not transformers and not (folder / MODULES).is_file():
        return None
    encoder: dict[str, Any] = {}
    if transformers:
        encoder = _json(transformers[0], dict)
    longest = encoder.get("max_seq_length")
    is_length = type(longest) is int and longest >= 1
    if longest is not None and not is_length:
        raise _damaged(transformers[0], f"max_seq_length is {str(longest)[:40]}")
    config: dict[str, Any] = {}
    if (folder / CONFIG).is_file():
        config = _json(folder / CONFIG, dict)
    prompts = config.get("prompts") or {}
    are_strings = isinstance(prompts, dict) and all(
        isinstance(prompt, str) for prompt in prompts.values()
    )
    if not are_strings:
        raise _damaged(folder / CONFIG, "prompts is not an object of strings")
    default = config.get("default_prompt_name")
    prompt = ""
    if isinstance(default, str):
        prompt = prompts.get(default, "")
    pooling, missing = _modules(folder)
    modes = _modes(pooling)
    if len(modes) > 1 or modes[0] not in POOLS:
        missing = missing or f"pools by {' and '.join(modes)[:80]}"
    elif prompt and pooling.get("include_prompt") is False:
        missing = missing or "leaves the prompt out of the mean"
    others = tuple(name for name, text in prompts.items() if text and name != default)
    lower = bool(encoder.get("do_lower_case"))
    pool = POOLS.get(modes[0], "mean")
    return SentenceModules(longest, lower, prompt, others, pool, missing)


def _modules(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the pooling's config, and the first module that `hs.embed` lacks."""
    if not (folder / MODULES).is_file():
        return {}, ""
    pooling: dict[str, Any] = {}
    missing = ""
    for kind, path in _listed(folder):
        if kind == "Pooling" and (folder / path / "config.json").is_file():
            pooling = _json(folder / path / "config.json", dict)
        elif kind not in SUPPORTED:
            missing = missing or f"has a module {kind[:40]}"
    return pooling, missing


def _listed(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the class name and the folder of each module."""
    for module in _json(folder / MODULES, list):
        match module:
            case {"type": str(kind), "path": str(path)}:
                pass
            case _:
                raise _damaged(folder / MODULES, "a module has no type or no path")
        if ".." in Path(path).parts or Path(path).is_absolute():
            raise _damaged(folder / MODULES, f"{path[:80]!r} lies outside the folder")
        # Without the package that the class is in.
        yield kind.rpartition(".")[2], path


def _modes(pooling: dict[str, Any]) -> list[str]:
    """Return the pooling modes, in the words of sentence-transformers."""
    named = pooling.get("pooling_mode")
    if named is None:
        named = [mode for key, mode in MODES.items() if pooling.get(key)]
    elif not isinstance(named, list):
        named = [named]
    return [str(mode) for mode in named] or ["mean"]


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
