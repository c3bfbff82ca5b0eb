"""Run the checks that every analysis inherits on the right entropy, and on each wrong
one: `python -m labs.mutants.entropy`.
"""

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

from labs.mutants.entropy.wrong import WRONG, failures


def main() -> int:
    """Check, print; 1 if a wrong entropy passes, or the right one does not."""
    parser = argparse.ArgumentParser(
        prog="python -m labs.mutants.entropy", description=__doc__
    )
    parser.add_argument(
        "--only", nargs="+", choices=WRONG, default=list(WRONG), help="some faults"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes"
    )
    parser.add_argument("--all", action="store_true", help="print every failure")
    options = parser.parse_args()
    missed = 0
    names = ["", *options.only]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context) as pool:
        for name, found in zip(names, pool.map(failures, names), strict=True):
            if not name:
                print("\n  ".join([f"right: breaks {len(found)} laws", *found]))
                anyway = set(found)
                continue
            new = [failure for failure in found if failure not in anyway]
            missed += not new
            told = new if options.all else new[:1]
            verdict = f"caught by {len(new)}, such as" if new else "NOT CAUGHT"
            print("\n  ".join([f"{name}: {verdict}", *told]), flush=True)
    count = len(options.only)
    print(f"{count - missed} of {count} wrong entropies are caught.")
    return int(bool(anyway or missed))


if __name__ == "__main__":
    sys.exit(main())
