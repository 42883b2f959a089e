"""Draws the pictures of the console in the documentation from the runs that the demo left: `nox -s screenshots`.

It needs Chromium; `AGL_TEST_BROWSER` names another browser of its kind.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parent.parent
STORE = ROOT / "examples/calc/out/runs.db"
TARGET = ROOT / "docs/images"

VIEWS = {
    "console-learning": ("/runs/calc", 800),
    "console-group": ("/group?experiment=calc&algorithm=grpo&step=6&group=task-a693c4fc8e1af34d", 660),
    "console-tokens": ("/rollouts/calc-1-grpo-train-00006-00000-000/tokens", 470),
}
"""Address and height by the name of the picture; the demo's tasks and rollouts have the same ids on every machine."""

WIDTH = 1200


@contextmanager
def console(store: Path) -> Generator[str]:
    """Serve the runs; gives the address."""
    folder = store.parent.parent  # where the demo ran, so that the pictures show the store as its reader writes it
    command = [
        sys.executable,
        "-m",
        "agl",
        "console",
        str(store.relative_to(folder)),
        "--tokenizer",
        str(store.parent / "model"),
    ]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # noqa: S101  # asked for
        said = process.stdout.readline().split()
        try:
            yield said[2].removesuffix("/")
        finally:
            process.terminate()


def draw(browser: Browser, address: str, target: Path, *, height: int) -> None:
    """Write one view as a picture; raises RuntimeError for a page that is an error."""
    page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme="light")
    answer = page.goto(address, wait_until="load")
    if answer is None or not answer.ok:
        raise RuntimeError(f"{address} answers {answer.status if answer else 'nothing'}; run nox -s demo again")
    page.wait_for_timeout(500)  # the curves are drawn
    page.screenshot(path=target)
    page.close()


def main() -> None:
    """Draw every view."""
    parser = argparse.ArgumentParser(prog="python -m tools.screenshots", description=__doc__)
    parser.add_argument("--store", type=Path, default=STORE, help="the demo's runs; by default those of nox -s demo")
    options = parser.parse_args()
    program = os.environ.get("AGL_TEST_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    if not options.store.exists():
        parser.error(f"there is no {options.store}; run nox -s demo first")
    if program is None:
        parser.error("no Chromium is installed: apt-get install chromium")
    TARGET.mkdir(exist_ok=True)
    with console(options.store) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, (path, height) in VIEWS.items():
            target = TARGET / f"{name}.png"
            draw(browser, address + path, target, height=height)
            print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1000:.0f} kB")
        browser.close()


if __name__ == "__main__":
    main()
