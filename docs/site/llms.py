"""Write llms.txt and llms-full.txt: the site for programs that read plain text."""

import re
from pathlib import Path

from docs.site.pages import Pages, page_name
from docs.site.structure import name_groups

HEAD = """# hiddenscope

> A workbench for the hidden states of transformer models: see, measure, store and change every one of them.

All pages in one file: [llms-full.txt](llms-full.txt)
"""
# Notes to generators, which say nothing to a reader.
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def write_llms(pages: Pages, folder: Path) -> None:
    """Write both files into the folder of the built site."""
    lines = [HEAD]
    for section in pages.sections:
        lines.append(f"## {section.title}\n")
        page = section.page
        lines.append(_entry(page.title, page_name(page.path), page.line))
        for page in section.pages:
            lines.append(_entry(page.title, page_name(page.path), page.line))
        if section.word == "reference":
            for group in name_groups():
                lines.append(_entry(group.title, f"api/{group.word}", group.line))
        lines.append("")
    (folder / "llms.txt").write_text("\n".join(lines), "utf-8")
    texts = []
    for name, text in pages.plain.items():
        texts.append(f"<!-- {name}.html -->\n\n{COMMENT.sub('', text).strip()}\n")
    (folder / "llms-full.txt").write_text("\n\n".join(texts), "utf-8")


def _entry(title: str, name: str, line: str) -> str:
    return f"- [{title}]({name}.html): {line}"
