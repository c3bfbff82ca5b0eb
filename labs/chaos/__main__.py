"""Run every kind of fault, and print what was done and what was found."""

import argparse
import importlib
import sys
import time
from pathlib import Path

KINDS = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if "\ndef run(" in path.read_text("utf-8")
)


def main() -> None:
    """Run the kinds that are named, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m labs.chaos", description="Inject faults into stores and jobs."
    )
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], help="only these")
    parser.add_argument(
        "--count", type=int, help="how many of each, in place of the usual number"
    )
    options = parser.parse_args()
    failed = False
    for kind in options.kinds or KINDS:
        began = time.monotonic()
        run = importlib.import_module(f"labs.chaos.{kind}").run
        first, *wrong = run() if options.count is None else run(options.count)
        print(f"{first} ({time.monotonic() - began:.0f} s)", flush=True)
        for line in wrong:
            failed = True
            print(f"  {line}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
