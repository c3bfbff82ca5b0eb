"""Run the checks that every analysis must pass on the right entropy, and on each wrong
one: python -m labs.mutants.entropy.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from typing import Any

from hiddenscope import testing
from labs.mutants.entropy import entropy
from labs.mutants.entropy.wrong import WRONG, wrong_entropy

# Texts of different lengths: padding, order and batches can go wrong.
TEXTS = ["A cat.", "The cat sat on the mat.", "On the mat sat the rest of it."]


def main() -> int:
    """Check, print; 1 if a wrong entropy passes or the right one does not."""
    parser = argparse.ArgumentParser(
        prog="python -m labs.mutants.entropy", description=__doc__
    )
    parser.add_argument(
        "--only", nargs="+", choices=WRONG, default=list(WRONG), help="some faults"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    found = failures(entropy)
    print("\n".join([f"right: {len(found)} failures", *found]), flush=True)
    missed = []
    for name in options.only:
        wrong = failures(wrong_entropy(name))
        new = [failure for failure in wrong if failure not in found]
        if not new:
            missed.append(name)
        print(f"{name}: {new[0] if new else 'NO CHECK FAILS'}", flush=True)
    caught = len(options.only) - len(missed)
    print(f"{caught} of {len(options.only)} wrong entropies are caught.")
    return int(bool(found or missed))


def failures(analysis: Callable[..., Any]) -> list[str]:
    """Return what the checks say of an analysis, one line for each failure."""
    try:
        testing.check_analysis(analysis, ask=lambda model: analysis(model, TEXTS))
    except AssertionError as error:
        return [line.strip() for line in str(error).splitlines() if line.strip()]
    return []


if __name__ == "__main__":
    sys.exit(main())
