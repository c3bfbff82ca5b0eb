"""Install the wheel in an empty environment and use it there: `make smoke`.

The environment and the folder that commands run in are temporary and outside the
checkout, so that nothing of the checkout can stand in for what the wheel lacks. Only
the browser is driven from here. Models come from the user's cache, unless
`--fresh-cache` is given.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.release.contents import ROOT, wheel_faults

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu"]
FLAGS += ["--disable-background-networking", "--disable-component-update"]
# Variables by which the checkout could reach into the environment.
FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
# A slow machine takes minutes for the demo.
SECONDS = 900


class SmokeError(Exception):
    """Something that a user of the wheel would see go wrong."""


@dataclass(frozen=True)
class Installation:
    """An environment with the wheel, and a folder to run its commands in."""

    environment: Path
    folder: Path
    variables: dict[str, str]

    @property
    def command(self) -> str:
        """Return the path of the installed command."""
        return str(self.environment / "bin" / "hiddenscope")

    def run(self, *words: str) -> str:
        """Run a command and return what it printed; raise if it fails."""
        start = time.perf_counter()
        shown = " ".join(words)
        try:
            done = subprocess.run(
                [self.command, *words],
                cwd=self.folder,
                env=self.variables,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SmokeError(
                f"hiddenscope {shown} took more than {SECONDS} seconds"
            ) from None
        if done.returncode != 0:
            raise SmokeError(f"hiddenscope {shown} failed:\n{done.stdout}{done.stderr}")
        report(f"hiddenscope {shown}", start)
        return done.stdout


def report(what: str, start: float) -> None:
    """Print a step that went well, and how long it took."""
    print(f"  {time.perf_counter() - start:6.1f} s  {what}", flush=True)


def require(condition: object, message: str) -> None:
    """Raise unless something is so."""
    if not condition:
        raise SmokeError(message)


def install(wheel: Path, extras: str, to: Path) -> None:
    """Make an empty environment and install the wheel in it."""
    start = time.perf_counter()
    venv.create(to, with_pip=True)
    pip = [str(to / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    pip += ["--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, f"{wheel}{extras}"], cwd=to, env=own_variables(), check=True)
    report(f"pip install {wheel.name}{extras}", start)


def own_variables(**changes: str) -> dict[str, str]:
    """Return the variables of this process without those that lead to the checkout."""
    variables = {**os.environ, **changes}
    for name in FOREIGN:
        variables.pop(name, None)
    return variables


def weigh(environment: Path) -> float:
    """Return the size of an environment on disk in megabytes."""
    total = 0
    for path in environment.rglob("*"):
        if path.is_file() and not path.is_symlink():
            total += path.stat().st_size
    return total / 1e6


def check_commands(installation: Installation, version: str) -> None:
    """Ask for the version, a demo, a probe, a store and a diagnosis."""
    printed = installation.run("--version").strip()
    require(printed == version, f"--version says {printed}, and the wheel {version}")
    where = subprocess.run(
        [
            str(installation.environment / "bin" / "python"),
            "-c",
            "import hiddenscope; print(hiddenscope.__file__)",
        ],
        cwd=installation.folder,
        env=installation.variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    inside = Path(where.strip()).is_relative_to(installation.environment)
    require(inside, f"the package is imported from {where}")
    doctor = json.loads(installation.run("doctor", "--json"))
    require(doctor["healthy"], "doctor finds a problem")
    installation.run("demo", "--out", "demo.html", "--quiet")
    probe = json.loads(installation.run("probe", "cities-incomplete", "--json"))
    require(probe, "probe finds nothing")
    installation.run(
        "extract", "cities-complete", "--to", "states", "--sites", "layer.3,final"
    )
    verified = json.loads(installation.run("store", "verify", "states", "--json"))
    require(verified["intact"] and verified["complete"], f"the store is {verified}")


@contextmanager
def serving(installation: Installation) -> Iterator[str]:
    """Run `hiddenscope serve` while the body runs; give its link."""
    process = subprocess.Popen(
        [installation.command, "serve", "--no-open", "--json", "--port", "8931"],
        cwd=installation.folder,
        env=installation.variables,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("}"):
                break
        require(lines, f"serve printed nothing and ended with {process.poll()}")
        yield json.loads("".join(lines))["link"]
    finally:
        process.terminate()
        process.wait(timeout=30)


@contextmanager
def browser_page() -> Iterator[Any]:
    """Open a page of Chromium; raise for whatever it could not load or run."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("HIDDENSCOPE_CHROMIUM")
    for name in ("chromium-headless-shell", "chromium", "google-chrome"):
        path = path or shutil.which(name)
    require(path, "there is no Chromium: `make browser` installs it")
    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("requestfailed", lambda request: faults.append(request.url))

        def note_status(response: Any) -> None:
            # Browsers ask every site for an icon.
            if response.status >= 400 and not response.url.endswith("favicon.ico"):
                faults.append(f"{response.status} {response.url.partition('?')[0]}")

        page.on("response", note_status)
        yield page
        browser.close()
    require(not faults, "the page has faults:\n" + "\n".join(faults))


def wait_for_grid(page: Any, heading: str) -> None:
    """Wait until a grid with these words above it is painted."""
    # The policy of the page forbids playwright's own way of waiting.
    title = "document.querySelector('.grid h2')?.textContent ?? ''"
    shown = ""
    for _ in range(20 * 60):
        shown = page.evaluate(title)
        if heading in shown:
            break
        page.wait_for_timeout(50)
    require(heading in shown, f"the page shows {shown!r} and not {heading!r}")
    page.wait_for_timeout(500)
    shades = page.evaluate(COUNT_SHADES)
    require(shades > 10, f"the grid is painted in {shades} colours")


COUNT_SHADES = """() => {
  const canvases = [...document.querySelectorAll('.grid canvas')];
  const shades = new Set();
  for (const canvas of canvases) {
    const { width, height } = canvas;
    if (!width || !height) continue;
    const context = canvas.getContext('2d');
    const pixels = new Uint32Array(
      context.getImageData(0, 0, width, height).data.buffer);
    for (let place = 0; place < pixels.length; place += 97) shades.add(pixels[place]);
  }
  return shades.size;
}"""


def check_pages(installation: Installation) -> None:
    """Open the page of the demo, and the workbench with its worked example."""
    start = time.perf_counter()
    with browser_page() as page:
        page.goto((installation.folder / "demo.html").as_uri())
        wait_for_grid(page, "norm")
    report("the page of the demo in Chromium", start)
    start = time.perf_counter()
    with serving(installation) as link, browser_page() as page:
        page.goto(link)
        wait_for_grid(page, "What each layer of smollm2")
        # Close it before the server, or its open connection would be a fault.
        page.close()
    report("the workbench in Chromium, with the worked example", start)


def check_wheel(wheel: Path, *, extras: str = "[app]", fresh_cache: bool) -> None:
    """Install a wheel elsewhere and use it; raise SmokeError where it fails."""
    faults = wheel_faults(wheel)
    require(not faults, "\n".join(faults))
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory(prefix="hiddenscope-smoke-") as place:
        environment = Path(place) / "environment"
        folder = Path(place) / "folder"
        folder.mkdir()
        install(wheel, extras, environment)
        print(f"           {weigh(environment):,.0f} MB on disk")
        changes = {}
        if fresh_cache:
            changes["HIDDENSCOPE_CACHE"] = str(Path(place) / "cache")
        variables = own_variables(**changes)
        installation = Installation(environment, folder, variables)
        check_commands(installation, version)
        check_pages(installation)


def main(words: Sequence[str] | None = None) -> int:
    """Run the smoke test; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m labs.release.smoke")
    parser.add_argument("--wheel", type=Path, help="by default the one in dist/")
    parser.add_argument("--fresh-cache", action="store_true", help="download models")
    options = parser.parse_args(words)
    wheel = options.wheel
    if wheel is None:
        wheels = sorted((ROOT / "dist").glob("*.whl"))
        if len(wheels) != 1:
            print("There must be one wheel in dist/: run `make dist`.")
            return 2
        wheel = wheels[0]
    try:
        check_wheel(wheel.resolve(), fresh_cache=options.fresh_cache)
    except SmokeError as error:
        print(f"The smoke test failed: {error}", file=sys.stderr)
        return 1
    print("The wheel works in an empty environment.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
