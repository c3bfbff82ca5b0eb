"""A workbench for the hidden states of transformer models.

    import hiddenscope as hs

    model = hs.load()
    states = model.capture("The capital of France is Paris.")
    hs.anatomy(model)
    hs.profile(model, "The capital of France is Paris.").show()

The names come from the lists in `catalog`. Each is imported when it is first used, so
that `import hiddenscope` loads no torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from hiddenscope import errors as errors
from hiddenscope import progress as _progress
from hiddenscope.catalog import PUBLIC

# The same names for type checkers; tests/unit/test_public.py prints what is missing.
if TYPE_CHECKING:
    from hiddenscope import testing as testing
    from hiddenscope.analyses.anatomy import anatomy as anatomy
    from hiddenscope.analyses.attention import attention as attention
    from hiddenscope.analyses.circuit import circuit as circuit
    from hiddenscope.analyses.cluster import cluster as cluster
    from hiddenscope.analyses.compare import compare as compare
    from hiddenscope.analyses.contributions import contributions as contributions
    from hiddenscope.analyses.drift import drift as drift
    from hiddenscope.analyses.edges import edges as edges
    from hiddenscope.analyses.embed import embed as embed
    from hiddenscope.analyses.embed.compute import Adjustment as Adjustment
    from hiddenscope.analyses.examples import examples as examples
    from hiddenscope.analyses.features import features as features
    from hiddenscope.analyses.graft import graft as graft
    from hiddenscope.analyses.lens import lens as lens
    from hiddenscope.analyses.lens.fitted import Lens as Lens
    from hiddenscope.analyses.patch import patch as patch
    from hiddenscope.analyses.probe import probe as probe
    from hiddenscope.analyses.profile import profile as profile
    from hiddenscope.analyses.project import project as project
    from hiddenscope.analyses.project.pictures import Pictures as Pictures
    from hiddenscope.analyses.search import search as search
    from hiddenscope.analyses.steer import steer as steer
    from hiddenscope.analyses.variable import variable as variable
    from hiddenscope.analyses.visibility import visibility as visibility
    from hiddenscope.analyses.visibility.sampling import Sampling as Sampling
    from hiddenscope.causes.contrast import Contrast as Contrast
    from hiddenscope.causes.contrast import Interchange as Interchange
    from hiddenscope.directions.dictionary import Dictionary as Dictionary
    from hiddenscope.directions.direction import Direction as Direction
    from hiddenscope.directions.encoding import Encoding as Encoding
    from hiddenscope.directions.training import Training as Training
    from hiddenscope.extract import Corpus as Corpus
    from hiddenscope.extract import Engine as Engine
    from hiddenscope.extract import ExtractJob as ExtractJob
    from hiddenscope.extract import extract as extract
    from hiddenscope.linear.probe import Probe as Probe
    from hiddenscope.loading.variants import Adapted as Adapted
    from hiddenscope.loading.variants import Quantised as Quantised
    from hiddenscope.model import Model as Model
    from hiddenscope.model import load as load
    from hiddenscope.passes.changes import Add as Add
    from hiddenscope.passes.changes import Project as Project
    from hiddenscope.passes.changes import Replace as Replace
    from hiddenscope.passes.changes import Scale as Scale
    from hiddenscope.passes.edit import edit as edit
    from hiddenscope.passes.edit import editing as editing
    from hiddenscope.passes.inputs import Inputs as Inputs
    from hiddenscope.passes.record import Pass as Pass
    from hiddenscope.passes.record import record as record
    from hiddenscope.passes.recording import recording as recording
    from hiddenscope.passes.resume import resume as resume
    from hiddenscope.results import Result as Result
    from hiddenscope.series import series as series
    from hiddenscope.series.member import Member as Member
    from hiddenscope.sites import Site as Site
    from hiddenscope.states import Pair as Pair
    from hiddenscope.states import Source as Source
    from hiddenscope.states import States as States
    from hiddenscope.states import Tokens as Tokens
    from hiddenscope.store import Store as Store
    from hiddenscope.store import open as open  # noqa: A004
    from hiddenscope.texts import read as read
    from hiddenscope.vectors.vectors import each_token as each_token
    from hiddenscope.views.render import story as story

_progress.quieten_tqdm()
_progress.quieten_torchao()

__version__ = "0.1.0"

__all__ = sorted([*PUBLIC, "__version__", "errors"])


class _Public(ModuleType):
    """A module whose public names are never replaced by subpackages of the same name.

    Importing `hiddenscope.extract.job` makes Python bind the subpackage here as
    `extract`, where users expect the function.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Public

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "testing":
            return import_module(f"{__name__}.testing")
        if name not in PUBLIC:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
