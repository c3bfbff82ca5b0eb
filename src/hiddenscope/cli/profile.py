"""The laminar profile of texts."""

import hiddenscope as hs
from hiddenscope.cli.command import Shared, SitesOption, TextsArgument, TruncateOption, command, show
from hiddenscope.cli.terminal import lines_of


@command
def profile(
    shared: Shared,
    texts: TextsArgument,
    sites: SitesOption = "layer.*,final",
    truncate: TruncateOption = False,
) -> None:
    """Measure the size of every state.

    Prints what the norms show; --out norms.html keeps the picture, --out norms.csv the numbers.
    """
    result = hs.profile(shared.load(), lines_of(texts), sites=sites, truncate=truncate)
    show(result, shared)
