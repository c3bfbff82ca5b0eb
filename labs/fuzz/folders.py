"""Model folders and GGUF files that hold absurd numbers, special files or damage.

Each case is a copy of a sound folder or file of a tiny model in which one to three
things were changed.
"""

import gzip
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hiddenscope as hs
from hiddenscope.testing import build, families, tiny_model, tiny_tokenizer
from labs.fuzz.gguf_file import PIECES, write_gguf
from labs.fuzz.sandbox import Case

CONFIGS = Path(__file__).parents[2] / "tests" / "conformance" / "tiny_configs.json.gz"
NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    7,
    1000,
    10**5,
    10**6,
    10**7,
    10**9,
    2**31,
    2**63,
    10**30,
    -(10**9),
)
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        "",
        "x",
        "5",
        "../x",
        "x" * 1000,
        [],
        {},
        [[]],
        {"a": 1},
        [1, 2],
        [None],
        0.5,
        -1.5,
        1e300,
    ),
    *(float("nan"), float("inf"), "\0", "🦊", ["x"] * 1000, {"": {"": {}}}),
)
COUNTS = (
    *(
        "num_labels",
        "num_hidden_layers",
        "num_decoder_layers",
        "n_layer",
        "num_layers",
        "encoder_layers",
    ),
    *(
        "decoder_layers",
        "num_experts",
        "num_local_experts",
        "attention_window",
        "max_position_embeddings",
    ),
    *(
        "num_attention_heads",
        "vocab_size",
        "hidden_size",
        "pad_token_id",
        "id2label",
        "label2id",
        "architectures",
    ),
    *(
        "model_type",
        "sliding_window",
        "layer_types",
        "rope_parameters",
        "quantization_config",
        "tie_word_embeddings",
    ),
)
SPECIAL = (
    "zero",
    "urandom",
    "fifo",
    "folder",
    "dangling",
    "loop",
    "socket",
    "directory of files",
)


def folders(count: int, seed: int, work: Path) -> Iterator[Case]:
    """Cases of folders, from one seed."""
    for number in range(count):
        chance = random.Random(f"folder {seed} {number}")
        base = _base(chance, work)
        name = f"folder {seed}/{number} {base.name}"
        yield Case(
            "folders",
            name,
            lambda base=base, chance=chance: _load(_changed(base, chance, work)),
        )


def ggufs(count: int, seed: int, work: Path) -> Iterator[Case]:
    """Cases of GGUF files, from one seed."""
    sound = sound_gguf(work)
    for number in range(count):
        chance = random.Random(f"gguf {seed} {number}")
        yield Case(
            "gguf",
            f"gguf {seed}/{number}",
            lambda chance=chance: _load(_changed_gguf(sound, chance, work)),
        )


def _load(path: Path) -> str:
    """Load it and capture a text, in a cache of its own; what is left of it goes when
    the case ends.
    """
    os.environ["HIDDENSCOPE_CACHE"] = str(path.parent / "cache")
    try:
        model = hs.load(path, device="cpu")
        model.capture("The rest." if model.tokenizer is not None else [[5, 6, 7]])
        return "loaded"
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)


# ---- folders


@cache
def rows() -> list[dict[str, Any]]:
    with gzip.open(CONFIGS) as file:
        return list(json.load(file))


FAMILIES = ("llama", "gpt2", "bert", "t5", "bart", "mixtral", "gpt_neox", "opt")


def _base(chance: random.Random, work: Path) -> Path:
    """A sound folder: of a common family half of the time, else of any class that a
    tiny configuration is known of.
    """
    if chance.random() < 0.5:
        family = chance.choice([name for name in FAMILIES if name in families()])
        return _saved(work / "sound" / family, lambda: tiny_model(family))
    row = chance.choice(rows())
    try:
        return _saved(
            work / "sound" / row["model_class"], lambda: build(row, most=2_000_000)
        )
    except Exception:  # transformers cannot build or save it
        return _saved(work / "sound" / "llama", lambda: tiny_model("llama"))


def _saved(folder: Path, make: Callable[[], Any]) -> Path:
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        make().save_pretrained(part)
        tiny_tokenizer().save_pretrained(part)
        part.rename(folder)
    return folder


def _changed(base: Path, chance: random.Random, work: Path) -> Path:
    folder = work / f"case-{os.getpid()}-{chance.getrandbits(32):08x}" / base.name
    shutil.copytree(base, folder)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        change = chance.choices(
            (_config, _tokenizer, _special, _weights, _bytes, _bomb),
            (10, 4, 2, 2, 2, 4),
        )[0]
        try:
            change(folder, chance)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
            struct.error,
        ):
            continue  # an earlier change left nothing here to be changed
    return folder


def _content(path: Path) -> bytes:
    """What is in a file; an earlier change may have put a pipe or a device in its
    place, which is read without end.
    """
    if not path.is_file():
        raise FileNotFoundError(path)
    return path.read_bytes()


def _value(chance: random.Random) -> Any:
    return chance.choice(NUMBERS if chance.random() < 0.6 else ODD)


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys, however deep."""
    found, waiting = list[tuple[Any, Any]](), [content]
    while waiting:
        current = waiting.pop()
        keys = (
            current
            if isinstance(current, dict)
            else range(len(current))
            if isinstance(current, list)
            else ()
        )
        found += [(current, key) for key in keys]
        waiting += [
            current[key] for key in keys if isinstance(current[key], dict | list)
        ]
    return found


def _mutate(path: Path, chance: random.Random, likely: tuple[str, ...] = ()) -> None:
    content = json.loads(_content(path))
    if likely and chance.random() < 0.4:
        content[chance.choice(likely)] = _value(chance)
    else:
        container, key = chance.choice(_places(content))
        if chance.random() < 0.1:
            del container[key]
        else:
            container[key] = _value(chance)
    path.write_text(json.dumps(content))


def _config(folder: Path, chance: random.Random) -> None:
    names = ("config.json",) * 5 + (
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    )
    name = chance.choice(names)
    likely = (
        COUNTS
        if name == "config.json"
        else ("extra_ids", "model_max_length", "pad_token", "added_tokens_decoder")
    )
    if not (folder / name).exists():
        (folder / name).write_text('{"x": 1}')
    _mutate(folder / name, chance, likely)


def _tokenizer(folder: Path, chance: random.Random) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(_content(path))
    count = chance.choice((2, 10, 30, 100, 1000))
    grow = {
        "type": "Replace",
        "pattern": {"String": "e"},
        "content": "e" * chance.choice((2, 10, 1000)),
    }
    every = {"type": "Replace", "pattern": {"Regex": "."}, "content": "xx"}
    twice = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
    }
    twice |= {
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
        "special_tokens": {},
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": False,
    }
    changes: list[Callable[[], Any]] = [
        lambda: content.update(normalizer={"type": "Sequence", "normalizers": [chance.choice((grow, every))] * count}),
        lambda: content.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [level] * count}),
        lambda: content.update(post_processor={"type": "Sequence", "processors": [twice] * count}),
        lambda: content.update(decoder={"type": "Sequence", "decoders": [grow] * count}),
        lambda: content.update(padding={"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 0,
                                        "pad_type_id": 0, "pad_token": "<pad>", "pad_to_multiple_of": None}),
        lambda: content["added_tokens"].append({"id": 10**9, "content": "e" * 1000, "single_word": False,
                                                "lstrip": False, "rstrip": False, "normalized": True,
                                                "special": False}),
    ]  # fmt: skip
    if chance.random() < 0.5:
        for change in chance.sample(changes, chance.choice((1, 2))):
            change()
        path.write_text(json.dumps(content))
    else:
        _mutate(path, chance)


def _special(folder: Path, chance: random.Random) -> None:
    """A device, a pipe, a folder or a broken link in the place of a file."""
    names = [path.name for path in folder.iterdir()] + [
        "chat_template.jinja",
        "vocab.txt",
        "added_tokens.json",
    ]
    path = folder / chance.choice(names)
    path.unlink(missing_ok=True)
    kind = chance.choice(SPECIAL)
    if kind in ("zero", "urandom"):
        path.symlink_to(f"/dev/{kind}")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "socket":
        import socket

        socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))
    else:
        path.mkdir()
        (path / "x").write_text("x")


def _weights(folder: Path, chance: random.Random) -> None:
    """Another header of the weights, or an index that lies."""
    path = folder / "model.safetensors"
    content = _content(path)
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    way = chance.randrange(4)
    if way == 0:
        entry = header[
            chance.choice([name for name in header if name != "__metadata__"])
        ]
        entry[chance.choice(("dtype", "shape", "data_offsets"))] = chance.choice(
            ("F64", [10**9, 10**9], [0, 0], [2**62, 2], _value(chance))
        )
    elif way == 1:
        name = chance.choice([name for name in header if name != "__metadata__"])
        header[name + chance.choice(("x", ".weight", "\0"))] = header.pop(name)
    elif way == 2:
        index = {
            "metadata": {},
            "weight_map": {
                name: chance.choice(("model.safetensors", "x", 5)) for name in header
            },
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    text = json.dumps(header).encode()
    claimed = chance.choice((len(text), len(text), 2**40, 0, len(text) + 1))
    path.write_bytes(struct.pack("<Q", claimed) + text + content[8 + length :])


def _bytes(folder: Path, chance: random.Random) -> None:
    """Flipped, cut or added bytes in any file."""
    path = chance.choice(sorted(folder.iterdir()))
    content = bytearray(_content(path))
    way = chance.randrange(4)
    if way == 0:
        for _ in range(chance.choice((1, 3, 20))):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif way == 1:
        del content[chance.randrange(len(content)) :]
    elif way == 2:
        at = chance.randrange(len(content))
        content[at:at] = chance.randbytes(chance.choice((1, 8, 1000)))
    else:
        content = bytearray(chance.randbytes(chance.choice((0, 1, 100, 10**5))))
    path.write_bytes(content)


def _bomb(folder: Path, chance: random.Random) -> None:
    """The numbers and shapes that are known to hurt."""
    path = folder / chance.choice(
        ("config.json",) * 4 + ("tokenizer_config.json", "generation_config.json")
    )
    content = json.loads(_content(path))
    many = chance.choice((10**4, 10**5, 10**6, 10**7, 10**9))
    integers = [(part, key) for part, key in _places(content) if type(part[key]) is int]
    way = chance.randrange(6)
    if way <= 2 and integers:  # any number of the config, absurdly large
        part, key = chance.choice(integers)
        part[key] = many
    elif way == 3:
        content[
            chance.choice(
                (
                    "num_labels",
                    "num_hidden_layers",
                    "n_layer",
                    "extra_ids",
                    "attention_window",
                )
            )
        ] = many
    elif way == 4:
        path.write_text('{"a":' * many + "1" + "}" * many if many < 10**7 else " ")
        if many >= 10**7:
            os.truncate(path, many)
        return
    else:
        content[chance.choice(("layer_types", "id2label", "x"))] = [
            "full_attention"
        ] * min(many, 10**6)
    path.write_text(json.dumps(content))


# ---- GGUF


def sound_gguf(work: Path) -> Path:
    """A sound GGUF file of a tiny llama."""
    path = work / "sound" / "tiny.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(path, _llama(len(PIECES)))
    return path


def _llama(words: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {
        "num_key_value_heads": 4,
        "vocab_size": words,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).eval()


def _changed_gguf(sound: Path, chance: random.Random, work: Path) -> Path:
    folder = work / f"case-{os.getpid()}-{chance.getrandbits(32):08x}"
    folder.mkdir(parents=True)
    content = bytearray(sound.read_bytes())
    numbers = _gguf_numbers(content)
    for _ in range(chance.choice((1, 1, 2))):
        way = chance.randrange(5)
        # A number of the metadata, or a count, a length or a size of the header.
        if way <= 2:
            at, width = chance.choice(numbers)
            value = chance.choice(
                (
                    0,
                    1,
                    3,
                    10**3,
                    10**4,
                    10**5,
                    10**6,
                    10**7,
                    10**9,
                    2**31,
                    2**32 - 1,
                    2**63,
                )
            )
            content[at : at + width] = (value % 2 ** (8 * width)).to_bytes(
                width, "little"
            )
        elif way == 3:
            for _ in range(chance.choice((1, 5))):
                content[chance.randrange(min(len(content), 12_000))] ^= (
                    1 << chance.randrange(8)
                )
        else:
            del content[chance.randrange(len(content)) :]
            break
    path = folder / "tiny.gguf"
    path.write_bytes(content)
    return path


def _gguf_numbers(content: bytearray) -> list[tuple[int, int]]:
    """Where the integers of the header are, each with its width in bytes."""
    import gguf

    found = [(4, 4), (8, 8), (16, 8)]
    for name in gguf.constants.Keys.LLM.__dict__.values():
        key = str(name).replace("{arch}", "llama").encode()
        at = content.find(key)
        if at > 0 and isinstance(name, str) and len(key) > 6:
            found += [(at + len(key) + 4, 4)] * 4
            found.append((at - 8, 8))
    for word in (
        b"tokenizer.ggml.tokens",
        b"tokenizer.ggml.scores",
        b"token_embd.weight",
        b"output.weight",
        b"blk.0.",
    ):
        at = content.find(word)
        found += [
            (at - 8, 8),
            *((at + len(word) + step, 8) for step in (4, 8, 12, 16, 20)),
        ]
    return found
