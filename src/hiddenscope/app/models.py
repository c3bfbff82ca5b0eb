"""Models: what the worker keeps between two questions."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import TypeAlias

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.errors import TextError
from hiddenscope.states import Pair, States, load_states
from hiddenscope.workers import Header

MAX_MODELS = 2
MAX_CAPTURES = 16
MAX_CAPTURED_BYTES = 256 * 2**20

StoredStates: TypeAlias = hs.Store | States | Pair


class Models:
    """Loaded models, states of the last texts, and the stored states that are open.

    A page asks many questions about one text. Only a new text is computed.
    """

    def __init__(self, device: str | None = None) -> None:
        self.device = device
        self._loaded: OrderedDict[str, hs.Model] = OrderedDict()
        self._captured: OrderedDict[tuple[int, str], States] = OrderedDict()
        self._opened: tuple[str, StoredStates] | None = None

    def get(self, choice: Header) -> hs.Model:
        """Return the model of a choice, loading it from its path if needed."""
        path, dtype = choice["path"], choice.get("dtype")
        key = json.dumps([path, dtype, choice.get("identity")])
        if key not in self._loaded:
            while len(self._loaded) >= MAX_MODELS:
                self._loaded.popitem(last=False)
                # Captured states are found by the id of their model, which Python may
                # give to the next one.
                self._captured.clear()
            with progress.status(f"Loading {Path(path).name}"):
                self._loaded[key] = hs.load(path, dtype=dtype, device=self.device)
        self._loaded.move_to_end(key)
        return self._loaded[key]

    def stored_states(self, choice: Header) -> StoredStates:
        """Return the states in a store or a file; the last ones stay open."""
        key = json.dumps([choice["path"], choice["identity"]])
        if self._opened is None or self._opened[0] != key:
            self._opened = None
            path = Path(choice["path"])
            states = hs.open(path) if path.is_dir() else load_states(path)
            self._opened = key, states
        return self._opened[1]

    def states(self, model: hs.Model, text: str) -> States:
        """Return the states of one text, at every layer and final."""
        key = id(model), text
        if key not in self._captured:
            captured = model.capture(text)
            if not isinstance(captured, States):
                raise TextError(
                    "No grid of one text",
                    f"{model.name} has an encoder and a decoder",
                    "Ask an analysis in its place: lens, profile, compare.",
                )
            self._captured[key] = captured
            self._drop_captured()
        self._captured.move_to_end(key)
        return self._captured[key]

    def _drop_captured(self) -> None:
        """Drop the states that were not used for longest, down to the limits."""
        total = sum(states.values.nbytes for states in self._captured.values())
        while len(self._captured) > 1:
            if len(self._captured) <= MAX_CAPTURES and total <= MAX_CAPTURED_BYTES:
                return
            _, dropped = self._captured.popitem(last=False)
            total -= dropped.values.nbytes
