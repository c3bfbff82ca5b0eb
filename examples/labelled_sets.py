"""Read labelled texts of the package sae-probes, which the experiments use.

It ships 155 sets for probes (Kantamneni et al. 2025). Of these, five are about grammar,
sentiment, topic and truth; the texts are those of CoLA, SST-2, news, tweets and SciQ.
"""

import csv
import io
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import zstandard

from hiddenscope.loading import cache, zoo
from hiddenscope.texts import Labelled

FOLDER = "sae_probes/data/cleaned_data"
MEMBERS = {
    "acceptability": zoo.WheelMember(
        f"{FOLDER}/87_glue_cola.csv.zst",
        58_885,
        "2a82f01f206350ddcfc53eb191e7e2ad870cfc88ebf7853337ef8616b285f507",
    ),
    "sentiment": zoo.WheelMember(
        f"{FOLDER}/92_glue_sst2.csv.zst",
        92_068,
        "542e37e87639c20ab2734f14f81ee55a453531152af2a9a812edd8e794045299",
    ),
    "topic": zoo.WheelMember(
        f"{FOLDER}/97_news_class.csv.zst",
        398_389,
        "a68150b3525e810b185d936019487e34f6536ae0daaa760e98281aed16688289",
    ),
    "emotion": zoo.WheelMember(
        f"{FOLDER}/102_twt_emotion.csv.zst",
        154_813,
        "21d0333fa4427b8b47bcd1869a6030c097c25d45b606ef09d11200a824bc92fc",
    ),
    "right answer": zoo.WheelMember(
        f"{FOLDER}/36_sciq_tf.csv.zst",
        119_823,
        "76a9f8ae4a5c14fddeb38bcc1328fbd7da0ac2cd4547a41befba0948cbbecbb6",
    ),
}
WHEEL = zoo.Wheel("sae-probes", "0.4.2", 45_068_606, tuple(MEMBERS.values()))
NAMES = {
    "acceptability": {"1": "acceptable", "0": "unacceptable"},
    "sentiment": {"1": "positive", "0": "negative"},
    "emotion": {"happiness": "happiness", "sadness": "sadness"},
    "right answer": {"1": "right", "0": "wrong"},
}
# Texts of fewer words say little; longer ones take longer.
SHORTEST, LONGEST = 4, 40


def labelled_set(name: str, count: int) -> Labelled:
    """Return the first texts of a set, equally many of each class.

    They are read from the cache folder, and fetched the first time.
    """
    rows = _rows(name)
    names = NAMES.get(name, {})
    classes = names or {row["target"]: row["target"] for row in rows}
    each = count // len(classes)
    counts: Counter[str] = Counter()
    texts: dict[str, str] = {}
    for row in rows:
        text = row["prompt"].strip()
        label = classes.get(row["target"])
        fits = SHORTEST <= len(text.split()) <= LONGEST
        if label is None or text in texts or not fits or counts[label] == each:
            continue
        counts[label] += 1
        texts[text] = label
    return Labelled(tuple(texts), tuple(texts.values()), name)


def _rows(name: str) -> list[dict[str, str]]:
    """Read the rows of a set: a prompt and a target."""

    def build(part: Path) -> None:
        with TemporaryDirectory() as folder:
            (wheel,) = zoo.download((WHEEL,), Path(folder))
            for member in WHEEL.members:
                with (part / Path(member.path).name).open("wb") as out:
                    zoo.extract(wheel, member, out)

    place = cache.build_once(cache.cache_folder() / "bench" / "sae-probes-0.4.2", build)
    content = (place / Path(MEMBERS[name].path).name).read_bytes()
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(content)) as reader:
        text = io.TextIOWrapper(reader, encoding="utf-8", newline="")
        return list(csv.DictReader(text))
