"""Build the site into out/site: `make site`.

    python -m docs.site [FOLDER] [--plain-sources]

Pages are written from the Markdown of the repository, Sphinx turns them into HTML, and
llms.txt lists them for programs. Every warning of Sphinx is an error. No network is
used. With --plain-sources, source files are shown without colours, which saves a third
of the time.
"""

import argparse
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from docs.site.llms import write_llms
from docs.site.pages import Pages
from docs.site.structure import ROOT

HERE = Path(__file__).resolve().parent


def build(folder: Path, *, colours: bool = True) -> int:
    """Build the site into a folder, and return Sphinx's exit code."""
    working = folder.parent / f"{folder.name}-work"
    pages = Pages(working / "pages", colours=colours)
    pages.write()
    # Pages that are gone must not stay behind.
    shutil.rmtree(folder, ignore_errors=True)
    options = ["-W", "--keep-going", "-q", "-E", "-b", "html"]
    folders = ["-c", HERE, "-d", working / "doctrees", pages.folder, folder]
    code = build_main([*options, *map(str, folders)])
    if code:
        return code
    live = pages.folder / "live"
    if live.is_dir():
        shutil.copytree(live, folder / "live")
    for name, path in pages.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / name)
    pages.sources.write(folder)
    write_llms(pages, folder)
    print(f"The site is in {folder}: open {folder / 'index.html'}")
    return 0


def main() -> int:
    """Build the site as the command line asks."""
    parser = argparse.ArgumentParser(prog="python -m docs.site")
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "out" / "site")
    parser.add_argument("--plain-sources", action="store_true")
    arguments = parser.parse_args()
    return build(arguments.folder.resolve(), colours=not arguments.plain_sources)


if __name__ == "__main__":
    sys.exit(main())
