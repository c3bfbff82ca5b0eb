"""A workbench for the hidden states of transformer models.

    import hiddenscope as hs

    model = hs.load()
    states = model.capture("The capital of France is Paris.")
    hs.anatomy(model)
    hs.profile(model, "The capital of France is Paris.").show()

The names are imported when they are first used, so that `import hiddenscope` loads no torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from hiddenscope import errors

if TYPE_CHECKING:
    from hiddenscope.analyses.anatomy import anatomy
    from hiddenscope.analyses.cluster import cluster
    from hiddenscope.analyses.compare import compare
    from hiddenscope.analyses.embed import embed
    from hiddenscope.analyses.lens import lens
    from hiddenscope.analyses.lens.fitted import Lens
    from hiddenscope.analyses.patch import patch
    from hiddenscope.analyses.probe import probe
    from hiddenscope.analyses.profile import profile
    from hiddenscope.analyses.project import project
    from hiddenscope.analyses.search import search
    from hiddenscope.analyses.steer import steer
    from hiddenscope.analyses.visibility import visibility
    from hiddenscope.linear.probe import Probe
    from hiddenscope.model import Model, load
    from hiddenscope.passes.changes import Add, Project, Replace, Scale
    from hiddenscope.passes.edit import edit, editing
    from hiddenscope.passes.record import Pass, record
    from hiddenscope.passes.recording import recording
    from hiddenscope.passes.resume import resume
    from hiddenscope.results import Result
    from hiddenscope.sites import Site
    from hiddenscope.states import Pair, Source, States, Tokens
    from hiddenscope.views.story import story

__version__ = "0.1.0"

__all__ = [
    "Add",
    "Lens",
    "Model",
    "Pair",
    "Pass",
    "Probe",
    "Project",
    "Replace",
    "Result",
    "Scale",
    "Site",
    "Source",
    "States",
    "Tokens",
    "__version__",
    "anatomy",
    "cluster",
    "compare",
    "edit",
    "editing",
    "embed",
    "errors",
    "lens",
    "load",
    "patch",
    "probe",
    "profile",
    "project",
    "record",
    "recording",
    "resume",
    "search",
    "steer",
    "story",
    "visibility",
]

_ROOMS = {
    "Add": "passes",
    "Lens": "analyses.lens.fitted",
    "Model": "model",
    "Pair": "states",
    "Pass": "passes",
    "Probe": "linear.probe",
    "Project": "passes",
    "Replace": "passes",
    "Result": "results",
    "Scale": "passes",
    "Site": "sites",
    "Source": "states",
    "States": "states",
    "Tokens": "states",
    "anatomy": "analyses.anatomy",
    "cluster": "analyses.cluster",
    "compare": "analyses.compare",
    "edit": "passes",
    "editing": "passes",
    "embed": "analyses.embed",
    "lens": "analyses.lens",
    "load": "model",
    "patch": "analyses.patch",
    "probe": "analyses.probe",
    "profile": "analyses.profile",
    "project": "analyses.project",
    "record": "passes",
    "recording": "passes",
    "resume": "passes",
    "search": "analyses.search",
    "steer": "analyses.steer",
    "story": "views.story",
    "visibility": "analyses.visibility",
}


class _Public(ModuleType):
    """This module, in which a public name is never taken by the room of the same name.

    Importing `hiddenscope.anatomy` makes Python bind the room here as `anatomy`, where users expect the function.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _ROOMS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Public

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _ROOMS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "Result" or _ROOMS[name].startswith("analyses."):
            import_module(f"{__name__}.views")  # so that a result finds its pages and figures
        value = getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
