"""Mutated text files, compressed bombs among them, and site strings."""

import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import hiddenscope as hs
from labs.fuzz.calls import model
from labs.fuzz.sandbox import Case

ROWS = [
    {"text": f"The {word} is here.", "label": word}
    for word in ("cat", "dog", "sun", "été", "雨")
] * 5
PIECES = (
    *(
        "layer",
        "final",
        "attn",
        "mlp",
        "mid",
        "cross",
        "encoder",
        "decoder",
        "hidden_states",
        "blocks",
    ),
    *(
        "hook_resid_post",
        ".",
        "-",
        ",",
        "*",
        "[",
        "]",
        "0",
        "3",
        "99",
        "-1",
        "10" * 50,
        " ",
        "\n",
        "\0",
        "é",
        "½",
        "",
    ),
)


def cases(count: int, seed: int, work: Path) -> Iterator[Case]:
    """Text files of every format, each with something changed."""
    folder = work / "texts"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        chance = random.Random(f"text {seed} {number}")
        yield Case(
            "text files", f"text {seed}/{number}", partial(_read, chance, folder)
        )


def sites(count: int, seed: int, work: Path) -> Iterator[Case]:
    """Site strings made of pieces of real ones; a thousand to a case."""
    for number in range(-(-count // 1000)):
        chance = random.Random(f"sites {seed} {number}")
        yield Case(
            "site strings",
            f"sites {seed}/{number}",
            partial(_choose, chance, min(1000, count)),
        )


def _read(chance: random.Random, folder: Path) -> str:
    kind, content = chance.choice([*_formats().items()])
    content = _mutated(bytearray(content), chance)
    suffix, pack = chance.choice([*_packers().items()])
    path = folder / f"{os.getpid()}{kind}{suffix}"
    path.write_bytes(pack(bytes(content)))
    try:
        hs.read(path)
        return "loaded"
    finally:
        path.unlink()


def _formats() -> dict[str, bytes]:
    import io

    import pandas

    frame = pandas.DataFrame(ROWS)
    table = io.BytesIO()
    frame.to_parquet(table)
    return {
        ".txt": "\n".join(row["text"] for row in ROWS).encode(),
        ".jsonl": "\n".join(json.dumps(row) for row in ROWS).encode(),
        ".csv": frame.to_csv(index=False).encode(),
        ".tsv": frame.to_csv(index=False, sep="\t").encode(),
        ".parquet": table.getvalue(),
    }


def _packers() -> dict[str, Callable[[bytes], bytes]]:
    import zstandard

    return {
        "": bytes,
        ".gz": gzip.compress,
        ".zst": zstandard.ZstdCompressor().compress,
    }


def _mutated(content: bytearray, chance: random.Random) -> bytearray:
    way = chance.randrange(7)
    at = chance.randrange(len(content))
    if way == 0:
        for _ in range(chance.choice((1, 5, 50))):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif way == 1:
        del content[at:]
    elif way == 2:
        content[at:at] = chance.choice(
            (b'"', b"\n\n", b"\xff", b"\0" * 100, b",,,", b"\xef\xbb\xbf", b"{", b"\r")
        )
    elif way == 3:  # a bomb, once it is compressed
        content[at:at] = chance.choice(
            (b"a", b"a\n", b"\n", b'"', b"[")
        ) * chance.choice((10**5, 10**7, 10**8))
    elif way == 4:
        content[:] = chance.randbytes(chance.choice((0, 1, 1000)))
    elif way == 5:
        content[:0] = chance.choice((b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"PAR1"))
    else:
        content[:] = b'{"text": ' + b"[" * chance.choice((10, 10**5)) + content
    return content


def _choose(chance: random.Random, count: int) -> str:
    for _ in range(count):
        pattern = "".join(chance.choice(PIECES) for _ in range(chance.randrange(1, 9)))
        for ask in (hs.Site.parse, model().anatomy.select):
            try:
                ask(pattern)
            except hs.errors.Error:
                continue
    return "loaded"
