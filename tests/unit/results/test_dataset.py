"""Arrays become a Dataset with the labels that every analysis shares."""

import numpy as np

from hiddenscope.results.dataset import Variables, to_dataset, token_coords
from hiddenscope.states import Tokens


def tokens(*strings: str) -> Tokens:
    count = len(strings)
    ids = range(10, 10 + count)
    return Tokens(None, [0] * count, list(range(count)), list(ids), strings)


def test_tokens_of_two_stacks_stand_one_after_another() -> None:
    stacks = [tokens("a", "longer"), tokens("b")]
    coords = token_coords(stacks, ["encoder", "decoder"])
    columns = {name: values.tolist() for name, (_, values) in coords.items()}
    assert columns == {
        "text": [0, 0, 0],
        "position": [0, 1, 0],
        "id": [10, 11, 10],
        "string": ["a", "longer", "b"],
        "stack": ["encoder", "encoder", "decoder"],
    }
    assert "stack" not in token_coords(stacks[:1])


def test_strings_stay_objects_and_attributes_are_copied() -> None:
    variables: Variables = {"norm": ("token", np.array([1.0, 2.0]), {"units": "L2"})}
    data = to_dataset(
        variables, token_coords([tokens("a", "longer")]), {"texts": ["x"]}
    )
    assert data["string"].dtype == object
    assert data.attrs == {"texts": ["x"]}
    data["norm"].attrs["units"] = "another"
    assert variables["norm"][2] == {"units": "L2"}
