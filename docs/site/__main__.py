"""Build the site into out/site: `make site`.

    python -m docs.site [FOLDER]

Pages are written from the Markdown of the repository, Sphinx turns them into HTML, and
llms.txt lists them for programs. Every warning of Sphinx is an error. No network is
used.
"""

import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from docs.site.llms import write_llms
from docs.site.pages import Pages
from docs.site.structure import ROOT

HERE = Path(__file__).resolve().parent


def build(folder: Path) -> int:
    """Build the site into a folder, and return Sphinx's exit code."""
    working = folder.parent / f"{folder.name}-work"
    pages = Pages(working / "pages")
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
    pages.sources.write(folder)
    write_llms(pages, folder)
    print(f"The site is in {folder}: open {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    chosen = sys.argv[1:] or [ROOT / "out" / "site"]
    sys.exit(build(Path(chosen[0]).resolve()))
