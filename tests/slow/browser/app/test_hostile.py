"""Names from files in a real browser: of columns, datasets, labels and models."""

import shutil
from pathlib import Path

from tests.workbench.pages import Opener, fragment
from tests.workbench.serving import Bench

HTML = "<img src=x onerror=alert(1)>"


def test_names_are_shown_and_not_run(
    look: Opener, bench: Bench, tiny_name: str, tmp_path: Path
) -> None:
    file = tmp_path / f"{HTML}.csv"
    rows = f'"{HTML}","{HTML} label"\n'
    for number in range(12):
        rows += f"the rest is {number},{HTML} {number % 2}\n"
    file.write_text(rows)
    root = bench.settings.root
    assert root is not None
    model = Path(shutil.copytree(root / "models" / "tiny", root / HTML))
    try:
        shown = look(fragment(tab="data", model=tiny_name))
        page = shown.page
        alerts: list[str] = []
        page.on("dialog", lambda dialog: alerts.append(dialog.message))
        page.get_by_label("Upload a dataset").set_input_files(file)
        columns = page.locator("section.columns")
        columns.get_by_role("columnheader", name=f"{HTML} label").wait_for()
        text, label, _ = columns.locator("select").all()
        text.select_option(HTML)
        label.select_option(f"{HTML} label")
        columns.get_by_role("button", name="Use these columns").click()
        page.get_by_role("button", name=file.name).wait_for()
        page.get_by_label("Method").select_option("pca")
        shown.run()
        page.locator(".panels canvas").first.wait_for()
        assert HTML in page.content().replace("&lt;", "<").replace("&gt;", ">")
        assert page.locator("img[src=x]").count() == 0 and not alerts
    finally:
        shutil.rmtree(model)
