"""Watcher: sees each wanted state of a pass once."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from hiddenscope import hooks
from hiddenscope.anatomy import Anatomy, Tap
from hiddenscope.errors import PassError
from hiddenscope.sites import Site


class Watcher:
    """Shows each wanted state once a pass: `keep(site, tap, tensor)`; says when it has seen them all."""

    def __init__(self, anatomy: Anatomy, sites: Sequence[Site], keep: Callable[[Site, Tap, Tensor], None]) -> None:
        self.anatomy, self.sites, self.keep = anatomy, sites, keep
        self.stops = False
        self.missing = set(sites)
        self._calls: Counter[tuple[str, hooks.Side]] = Counter()
        self._thread = threading.get_ident()

    @property
    def here(self) -> bool:
        """Whether it is called in its own thread, and not in somebody else's pass over the same module."""
        return threading.get_ident() == self._thread

    def begin(self) -> None:
        """A new pass: calls are counted from the first again."""
        self.missing = set(self.sites)
        self._calls.clear()

    def watches(self, module: nn.Module) -> list[hooks.Watch]:
        """The watches to be held while the model runs, one for each side of each module that shows a wanted state."""
        places: dict[tuple[str, hooks.Side], list[Site]] = defaultdict(list)
        for site in self.sites:
            tap = self.anatomy.taps[site]
            places[tap.path, tap.side].append(site)
        return [
            hooks.Watch(module.get_submodule(place[0]), place[1], self._seen(place, sites))
            for place, sites in places.items()
        ]

    def _seen(self, place: tuple[str, hooks.Side], sites: Sequence[Site]) -> Callable[..., None]:
        def seen(*what: Any) -> None:
            if not self.here:
                return
            call = self._calls[place]
            self._calls[place] += 1
            for site in sites:
                tap = self.anatomy.taps[site]
                if tap.call == call:
                    tensor = tap.read(*what)
                    if tensor is None:
                        raise PassError(f"The state at {site}", f"the {tap} holds no tensor", "Report this model.")
                    self.keep(site, tap, tensor)
                    self.missing.discard(site)
            if self.stops and not self.missing:
                raise hooks.Stopped

        return seen
