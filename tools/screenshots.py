"""Draws the pictures of the console in the documentation from what the demos left: `nox -s screenshots`.

It needs Chromium; `AGL_TEST_BROWSER` names another browser of its kind. Beside the pictures it writes a digest of the
files that draw each view, by which a test finds pictures that are older than their views.
"""

import argparse
import ast
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs/images"
DIGESTS = TARGET / "console.toml"
SOURCE = ROOT / "packages/agl-console/src/agl_console"

DEMOS = {
    "demo": ROOT / "examples/calc/out/runs.db",
    "demo_learn": ROOT / "examples/support/out/support.db",
}
"""The store that each session of nox leaves."""

VIEWS = {
    "demo": {
        "console-learning": ("/runs/calc", 800),
        "console-group": ("/group?experiment=calc&algorithm=grpo&step=6&group=task-a693c4fc8e1af34d", 660),
        "console-tokens": ("/rollouts/calc-1-grpo-train-00006-00000-000/tokens", 470),
    },
    "demo_learn": {"console-candidate": ("/learners/support/c1", 1080)},
}
"""Address and height by demo and by the name of the picture; tasks and rollouts have the same ids on every machine."""

DRAWN_BY = {
    "console-learning": ("learning.py", "templates/learning.html"),
    "console-group": ("group.py", "templates/group.html"),
    "console-tokens": ("tokens.py", "templates/tokens.html"),
    "console-candidate": ("learners.py", "templates/candidate.html"),
}
"""The files of each view alone; what all views share, such as the style, changes too often to redraw everything."""

WIDTH = 1200


def digest_of(name: str) -> str:
    """Return a digest of the files that draw a view; imports, comments and docstrings do not count."""
    texts = [(SOURCE / file).read_text(encoding="utf-8") for file in DRAWN_BY[name]]
    return hashlib.sha256("".join([_code(texts[0]), *texts[1:]]).encode()).hexdigest()[:16]


def _code(text: str) -> str:
    """Return the lines of a module without imports, comments and docstrings."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Expr):
            is_text = not isinstance(node, ast.Expr) or isinstance(node.value, ast.Constant)
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1)) if is_text else set()
    kept = (line.partition("  # ")[0] for number, line in enumerate(text.splitlines(), 1) if number not in left_out)
    return "\n".join(line for line in kept if line.strip() and not line.lstrip().startswith("#"))


def write_digests(names: Iterable[str]) -> None:
    """Record that the pictures with these names show their views as they are now."""
    known = tomllib.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.exists() else {}
    found = {**known, **{name: digest_of(name) for name in names}}
    text = "".join(f'{name} = "{digest}"\n' for name, digest in sorted(found.items()))
    DIGESTS.write_text(f"# Written by tools/screenshots.py: what drew each picture.\n{text}", encoding="utf-8")


@contextmanager
def console(store: Path) -> Generator[str]:
    """Serve the runs; gives the address."""
    folder = store.parent.parent  # where the demo ran, so that the pictures show the store as its reader writes it
    model = store.parent / "model"
    tokenizer = ["--tokenizer", str(model)] if model.exists() else []
    command = [sys.executable, "-m", "agl", "console", str(store.relative_to(folder)), *tokenizer]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # noqa: S101  # asked for
        said = process.stdout.readline().split()
        try:
            yield said[2].removesuffix("/")
        finally:
            process.terminate()


def draw(browser: "Browser", address: str, target: Path, *, height: int) -> None:
    """Write one view as a picture; raises RuntimeError for a page that is an error."""
    page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme="light")
    answer = page.goto(address, wait_until="load")
    if answer is None or not answer.ok:
        raise RuntimeError(f"{address} answers {answer.status if answer else 'nothing'}; run the demo again")
    page.wait_for_timeout(500)  # the curves are drawn
    page.screenshot(path=target)
    page.close()


def main() -> None:
    """Draw every view of the demos that have run."""
    parser = argparse.ArgumentParser(prog="python -m tools.screenshots", description=__doc__)
    parser.add_argument("--unchanged", action="store_true", help="draw nothing: the pictures still show the views")
    if parser.parse_args().unchanged:
        write_digests(DRAWN_BY)
        return
    program = os.environ.get("AGL_TEST_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    stores = {demo: store for demo, store in DEMOS.items() if store.exists()}
    if not stores:
        parser.error(f"no demo has run; run one of {', '.join(f'nox -s {demo}' for demo in DEMOS)} first")
    if program is None:
        parser.error("no Chromium is installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright  # the digests need no browser

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for demo, store in stores.items():
            draw_demo(browser, demo, store)
        browser.close()


def draw_demo(browser: "Browser", demo: str, store: Path) -> None:
    """Draw the views of a demo."""
    with console(store) as address:
        for name, (path, height) in VIEWS[demo].items():
            target = TARGET / f"{name}.png"
            draw(browser, address + path, target, height=height)
            print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1000:.0f} kB")
    write_digests(VIEWS[demo])


if __name__ == "__main__":
    main()
