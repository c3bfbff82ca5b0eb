"""A parameter of an analysis, described once for every place that asks for it.

From these the command, the request, the form of the page, and the code that repeats a
question are built.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hiddenscope.states.pooling import CHOICES, NAMES

Kind: TypeAlias = Literal[
    "text",
    "texts",
    "model",
    "data",
    "sites",
    "pooling",
    "choice",
    "integer",
    "numbers",
    "flag",
    "word",
    "words",
    "path",
    "contrast",
    "direction",
    "sampling",
]
"""What a parameter takes. `data` are labelled texts, `numbers` one number or several, a
`word` is any short string, and `words` are several. What may be a name or a path, such
as a lens or a corpus, is a `word`: a `path` becomes a `pathlib.Path`. A
`contrast`, a `direction` and a `sampling` have fields, which are parameters themselves.
"""

Default: TypeAlias = str | int | float | bool | tuple[float, ...] | None


@dataclass(frozen=True)
class Parameter:
    """One parameter of an analysis, or one field of it.

    A positional parameter is an argument of the command, and any other an option. With
    a `spelling` of its own, such as "-k", a positional one is an option too.

    Three attributes say where a parameter cannot be given:

    - `of_model`: not for stored states, which a model computed before.
    - `in_form`: False where a page must not give it, such as a path.
    - `python_only`: why the command has no option for it; empty where it has one.
    """

    name: str = ""
    kind: Kind = "word"
    help: str = ""
    default: Default = None
    required: bool | None = None
    positional: bool = False
    choices: tuple[str, ...] = ()
    # The smallest integer; None where any will do.
    least: int | None = 1
    fields: tuple["Parameter", ...] = ()
    # The public name that builds the value from the fields, and whether it takes the
    # model before them.
    constructor: str = ""
    takes_model: bool = False
    # The function has no default for it: where it is left out, None is passed.
    explicit: bool = False

    # On the command line.
    spelling: tuple[str, ...] = ()
    repeated: bool = False
    python_only: str = ""
    # Options that make the command use Python's default, if its own differs.
    python_default: tuple[str, ...] = ()
    # `--targets` and `--truncate` say how the texts are encoded, where the function
    # takes encoded texts in their place.
    encoded: bool = False
    # A file may hold states or vectors in place of texts.
    vectors: bool = False

    # In a form.
    label: str = ""
    # None: the same help as on the command line.
    form_help: str | None = None
    # How a list of choices shows that none is chosen.
    empty_choice: str = "none"
    # Shown below the other fields, under "More options".
    aside: bool = False
    in_form: bool = True
    of_model: bool = False

    @property
    def option(self) -> str:
        """Return how the option is spelled.

        >>> Parameter("low_memory", "flag").option
        '--low-memory'
        """
        if self.spelling:
            return self.spelling[0]
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_argument(self) -> bool:
        """Return whether the command takes it by its place."""
        return self.positional and not self.spelling


@dataclass(frozen=True)
class Description:
    """What can be asked of an analysis besides its model, and how it introduces itself.

    With `states`, stored states can be asked in place of a model. An analysis that
    needs next-token logits has a `verb_if_head_needed`, for the error about a model
    without a head: "Cannot patch ...". `summary` and `details` are the help of the
    command; without a summary that is the question of the analysis. `action` names it
    in a menu, and `promise` tells the reader of an empty page what the answer will
    show.
    """

    parameters: tuple[Parameter, ...] = ()
    states: bool = False
    verb_if_head_needed: str = ""
    summary: str = ""
    details: str = ""
    action: str = ""
    promise: str = ""


TEXTS_HELP = "The texts; @FILE reads those of a file, - one from each line of stdin."
SITES_HELP = "Which states: layer.3, layer.*, final, *.attn, a comma list."
# Which pooling is used if none is given, as a form shows it.
POOL_AS_TRAINED = "as trained, or mean"
POOL_BY_STACK = "last of a decoder and mean of an encoder"
SEED_HELP = "The seed of everything that is random."

TARGETS = Parameter(
    "targets",
    "texts",
    "The text of an encoder-decoder's decoder.",
    form_help="",
    aside=True,
    of_model=True,
)
TRUNCATE = Parameter(
    "truncate",
    "flag",
    "Cut a text that is longer than the model's window.",
    default=False,
    aside=True,
    of_model=True,
)
SITE = Parameter(
    "site",
    "sites",
    "Which state: layer.3, final; the last if not given.",
    aside=True,
)
TEXTS = Parameter(
    "texts", "texts", TEXTS_HELP, positional=True, form_help="", of_model=True
)
SITES = Parameter("sites", "sites", SITES_HELP, aside=True)
SEED = Parameter("seed", "integer", SEED_HELP, least=0, aside=True)
POOL = Parameter(
    "pool",
    "pooling",
    f"What stands for a text: {CHOICES}.",
    choices=NAMES,
    label="Pooling",
    empty_choice=POOL_AS_TRAINED,
    aside=True,
)
STACK_POOL = replace(
    POOL,
    help=f"What stands for a text: {CHOICES}; if not given, {POOL_BY_STACK}.",
    empty_choice=POOL_BY_STACK,
    aside=False,
)
