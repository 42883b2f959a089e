"""The console in a real browser: no requests to other servers, no errors, accessible, live, usable by keyboard."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl.schemas import Rollout
from agl_store_sqlite._store import SQLiteStore
from agl_testing.commands import run_agl

from .conftest import run_apart
from .records import HOSTILE, LONG_NAME, record, rollout_name
from .test_views import VIEWS

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.base", reason="axe-playwright-python is not installed")

BROWSER = os.environ.get("AGL_TEST_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome") or ""
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not BROWSER, reason="no Chromium is installed: apt-get install chromium"),
]

TOKEN = "an-admin-token-of-the-tests"
FIRST = rollout_name(0)
BROWSED = (*(view for view in VIEWS if "grpo-long" not in view), "/nothing")
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def address(filled: Path) -> Iterator[str]:
    """Start ``agl console`` over the filled store as a user would, and yield the address."""
    command = [sys.executable, "-m", "agl", "console", str(filled)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("console at http://127.0.0.1:"), said
        yield said.split()[2].removesuffix("/")
        process.terminate()
        assert 0 == process.wait(60)


@pytest.fixture
def acting(tmp_path: Path) -> Iterator[str]:
    """Start ``agl console --actions`` over a store with a finished and a queued rollout, and yield the address."""

    async def add() -> None:
        store = SQLiteStore(f"sqlite:///{tmp_path / 'runs.db'}")
        await record(store, "done", experiment=LONG_NAME)
        await store.enqueue([Rollout(rollout_id="waits", task=HOSTILE, experiment=LONG_NAME)])
        await store.close()

    run_apart(add())
    command = [sys.executable, "-m", "agl", "console", "runs.db", "--actions"]
    environment = {**os.environ, "AGL_TOKEN": TOKEN}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[2].removesuffix("/")
        finally:
            process.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


class Page:
    """A page in the browser that collects its requests and errors."""

    def __init__(self, browser: Any, *, width: int, scheme: str = "light", scripts: bool = True) -> None:
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme, java_script_enabled=scripts)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}") or dialog.dismiss())

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1600, "dark")])
def test_views_are_accessible_fit_and_load_nothing_from_elsewhere(
    browser: Any, address: str, width: int, scheme: str
) -> None:
    rules = Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    with Page(browser, width=width, scheme=scheme) as shown:
        for view in BROWSED:
            shown.page.goto(address + view)
            for summary in shown.page.query_selector_all("summary"):
                summary.click()
            if "/tokens" in view and (colours := shown.page.query_selector_all("[name=colour]")):
                colours[-1].check()  # the page of a span keeps the first one
            assert shown.page.evaluate("document.documentElement.scrollWidth") <= width, view
            shown.page.evaluate(rules)
            found = shown.page.evaluate("axe.run()")["violations"]
            assert [] == [(view, each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in SERIOUS]
        assert all(request.startswith(address + "/") for request in shown.requests)
        expected = [error for error in shown.errors if "404" not in error]  # the last view is a missing one
        assert [] == expected


def test_names_of_ordinary_length_stay_on_one_line_in_a_narrow_window(browser: Any, address: str) -> None:
    lines = """name => {
        const range = document.createRange();
        range.selectNodeContents(name);
        return range.getClientRects().length;
    }"""
    with Page(browser, width=360) as shown:
        shown.page.goto(address + "/?compare=sums&compare=sums-slow")
        names = shown.page.locator("th .name, th.name").filter(has_text=re.compile(r"^sums(-slow)?$"))
        assert names.count() >= 4
        assert {1} == {name.evaluate(lines) for name in names.all()}


def test_time_axis_is_that_of_the_bars(browser: Any, address: str) -> None:
    with Page(browser, width=360) as shown:
        shown.page.goto(f"{address}/rollouts/{FIRST}")
        for width in (360, 900, 1600):
            shown.page.set_viewport_size({"width": width, "height": 900})
            axis, bar = (shown.page.locator(part).first.bounding_box() for part in (".axis", ".tree .bar"))
            assert axis["x"] == pytest.approx(bar["x"], abs=2), width
            assert axis["width"] == pytest.approx(bar["width"], abs=3), width


def drawn_figures(shown: Page) -> int:
    """Return the number of figures once each is drawn; a card that opens draws its figures a moment later."""
    figures = shown.page.locator("figure").count()
    sync_api.expect(shown.page.locator("figure canvas")).to_have_count(figures)
    return figures


def test_figures_are_drawn_and_a_click_leads_to_the_rollouts_of_the_step(browser: Any, address: str) -> None:
    with Page(browser, width=1000) as shown:
        shown.page.goto(address + "/runs/sums")
        small, large = shown.page.evaluate("[ticksOf([0, 0.0001, 0.0002], 0.0001), ticksOf([1000, 1250], 250)]")
        assert [["0", "0.0001", "0.0002"], ["1,000", "1,250"]] == [small, large]
        assert ["0.0025", "0.005"] == shown.page.evaluate("ticksOf([0.0025, 0.005], 0.0025)")
        assert ["2.00e-7", "0"] == shown.page.evaluate("ticksOf([2e-7, 0], 1e-7)")
        assert ["0.0001235", "\N{EN DASH}"] == shown.page.evaluate("[value(null, 0.00012345678), value(null, null)]")
        assert 1 == shown.page.locator("figure canvas").count()
        legend = shown.page.locator("figure .u-legend").first
        assert re.search(
            r"step:?\s*grpo 60\s*grpo:?\s*0\.\d+ \[0\.\d+, [01]\.\d+\]\s*validation:?\s*0\.\d+", legend.inner_text()
        )
        for card in shown.page.locator(".card").all():
            card.locator("summary").press("Enter")
        assert drawn_figures(shown) > 5
        for figure, end in (("reward", "=grpo"), ("groups_silent", "=grpo&taught=nothing")):
            shown.page.goto(address + "/runs/sums")
            for card in shown.page.locator(f".card[data-card={figure}]").all():
                card.locator("summary").press("Enter")
            shown.page.locator(f"[data-figure={figure}] .u-over").click(position={"x": 100, "y": 50})
            shown.page.wait_for_url(re.compile(rf"/rollouts\?experiment=sums&step=[0-9]+&algorithm{end}$"))
        assert [] == shown.errors


def test_chart_is_saved_as_csv_and_png(browser: Any, address: str, tmp_path: Path) -> None:
    with Page(browser, width=1000) as shown:
        shown.page.goto(address + "/runs/sums")
        for kind, begins in (
            ("CSV", b"step,grpo,grpo low,grpo high,validation\n1,"),
            ("PNG", b"\x89PNG"),
        ):
            with shown.page.expect_download() as saved:
                shown.page.get_by_role("button", name=kind, exact=True).first.click()
            assert f"reward.{kind.lower()}" == saved.value.suggested_filename
            assert saved.value.path().read_bytes().startswith(begins)
        assert [] == shown.errors


def test_pinned_run_comes_first_after_a_reload(browser: Any, address: str) -> None:
    with Page(browser, width=1000) as shown:
        shown.page.goto(address)
        assert "sums-slow" not in shown.page.locator("[data-run]").first.inner_text()
        shown.page.get_by_role("button", name="Pin sums-slow to the top").press("Enter")
        shown.page.reload()
        assert "sums-slow" in shown.page.locator("[data-run]").first.inner_text()
        assert [] == shown.errors


def test_exported_run_draws_its_figures_from_one_file(browser: Any, filled: Path, tmp_path: Path) -> None:
    run_agl("console", str(filled), "export", "sums", "--output", "run.html", folder=tmp_path)
    with Page(browser, width=1000) as shown:
        shown.page.goto((tmp_path / "run.html").as_uri())
        for card in shown.page.locator(".card").all():
            card.locator("summary").click()
        assert drawn_figures(shown) > 5
        assert [(tmp_path / "run.html").as_uri()] == shown.requests
        assert [] == shown.errors


def test_tables_and_tokens_work_without_scripts(browser: Any, address: str) -> None:
    with Page(browser, width=1000, scripts=False) as shown:
        shown.page.goto(address)
        for run in ("sums", "sums-slow"):
            shown.page.get_by_label(f"Compare {run}", exact=True).check()
        shown.page.get_by_role("button", name="Compare").click()
        assert "Compare runs" in shown.page.inner_text("h1")
        shown.page.goto(address + "/rollouts")
        shown.page.get_by_label("Status").select_option("failed")
        shown.page.get_by_role("button", name="Filter").click()
        shown.page.get_by_role("link", name="sums-1-grpo-failed", exact=True).click()
        assert "KeyError" in shown.page.inner_text("main")
        shown.page.goto(f"{address}/rollouts/{FIRST}/tokens")
        before = shown.page.locator(".cells .m").first.evaluate("cell => getComputedStyle(cell).backgroundColor")
        shown.page.get_by_label("what can train").check()
        after = shown.page.locator(".cells .m").first.evaluate("cell => getComputedStyle(cell).backgroundColor")
        assert before != after


def test_keyboard_alone_follows_rollouts_and_spans_and_reads_tokens(browser: Any, address: str) -> None:
    with Page(browser, width=1000) as shown:
        shown.page.goto(address + "/rollouts/sums-1-grpo-hostile")
        shown.page.locator(".tree a").nth(2).focus()
        shown.page.keyboard.press("Enter")
        assert HOSTILE[:25] in shown.page.locator(".turn:target").inner_text()
        shown.page.goto(f"{address}/rollouts/{FIRST}")
        shown.page.keyboard.press("j")
        shown.page.wait_for_url(f"**/rollouts/{rollout_name(3)}?by=step")
        shown.page.keyboard.press("k")
        shown.page.wait_for_url(f"**/rollouts/{FIRST}?by=step")
        shown.page.goto(f"{address}/rollouts/{FIRST}/tokens")
        shown.page.locator("[data-cells]").focus()
        for _ in range(31):
            shown.page.keyboard.press("ArrowRight")
        said = shown.page.inner_text("[data-about-token]")
        assert said.startswith("position 30, token 40, log-probability -")
        assert "can train, advantage -0.5, version v1" in said
        assert [] == shown.errors


def test_task_and_request_are_copied(browser: Any, address: str) -> None:
    with Page(browser, width=1000) as shown:
        shown.context.grant_permissions(["clipboard-read", "clipboard-write"])
        copied = "navigator.clipboard.readText()"
        shown.page.goto(f"{address}/rollouts/{FIRST}")
        shown.page.get_by_text("ways to use it again").click()
        shown.page.get_by_role("button", name="Copy the task for agl dev").click()
        shown.page.get_by_text("Copied").wait_for()
        assert shown.page.evaluate(copied).startswith("printf '%s")
        shown.page.get_by_role("button", name="Copy the rollout as JSON").click()
        shown.page.get_by_text("Copied").nth(1).wait_for()
        assert shown.page.evaluate(copied).startswith('{"rollout_id":"' + FIRST)
        shown.page.goto(f"{address}/rollouts/{FIRST}/spans/3")
        shown.page.get_by_role("button", name="Copy as curl").click()
        shown.page.get_by_text("Copied").wait_for()
        assert shown.page.evaluate(copied).startswith('curl "$OPENAI_BASE_URL/chat/completions" ')
        assert [] == shown.errors


def test_page_shows_a_new_rollout_without_a_reload_and_keeps_the_filter_being_written(
    browser: Any, address: str, filled: Path
) -> None:
    async def add() -> None:
        store = SQLiteStore(f"sqlite:///{filled}")
        await store.enqueue([Rollout(rollout_id="just-now", task="live", experiment="live")])
        await store.close()

    with Page(browser, width=1000) as shown:
        with shown.page.expect_request("**/changes"):
            shown.page.goto(address + "/rollouts?experiment=live")
        shown.page.get_by_label("Text in id or task").fill("half-written")
        shown.page.wait_for_function("new Promise(done => setTimeout(() => done(true), 300))")
        run_apart(add())
        shown.page.get_by_role("link", name="just-now").wait_for(timeout=60_000)
        assert "half-written" == shown.page.get_by_label("Text in id or task").input_value()
        assert [] == shown.errors


def test_page_that_is_opened_in_the_background_takes_no_connection_until_it_is_seen(browser: Any, address: str) -> None:
    with Page(browser, width=1000) as shown:
        shown.page.add_init_script("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
        shown.page.goto(address + "/rollouts", wait_until="load")
        shown.page.wait_for_timeout(500)
        assert not [url for url in shown.requests if url.endswith("/changes")]
        with shown.page.expect_request("**/changes"):
            shown.page.evaluate(
                "Object.defineProperty(document, 'hidden', {value: false}); "
                "document.dispatchEvent(new Event('visibilitychange'))"
            )
        assert [] == shown.errors


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_keyboard_alone_signs_in_cancels_and_rates(browser: Any, acting: str, tmp_path: Path, scheme: str) -> None:
    rules = Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    with Page(browser, width=360, scheme=scheme) as shown:

        def check() -> None:
            shown.page.evaluate(rules)
            found = shown.page.evaluate("axe.run()")["violations"]
            assert [] == [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in SERIOUS]
            assert shown.page.evaluate("document.documentElement.scrollWidth") <= 360

        def press(name: str) -> None:
            focused = "[document.activeElement.innerText, document.activeElement.getAttribute('name')]"
            for _ in range(40):
                if name in shown.page.evaluate(focused):
                    return
                shown.page.keyboard.press("Tab")
            raise AssertionError(f"the Tab key does not reach {name}")

        shown.page.set_default_timeout(20_000)
        shown.page.goto(acting + "/rollouts/waits")
        press("Cancel it …")
        shown.page.keyboard.press("Enter")
        shown.page.wait_for_url("**/sign-in?*")
        press("token")
        check()
        shown.page.keyboard.type(TOKEN)
        shown.page.keyboard.press("Enter")
        shown.page.wait_for_url("**/actions/cancel?rollout=waits")
        check()
        press("Cancel the rollout")
        shown.page.keyboard.press("Enter")
        shown.page.get_by_role("status").wait_for()
        assert "the rollout waits is cancelled" in shown.page.inner_text("main")
        check()
        shown.page.goto(acting + "/rollouts/done")
        shown.page.keyboard.press("r")
        shown.page.wait_for_url("**/actions/rate?rollout=done")
        check()
        shown.page.keyboard.type("0.25")
        shown.page.keyboard.press("Enter")
        shown.page.wait_for_url("**/actions/rate?rollout=done&value=0.25*")
        shown.page.keyboard.press("Enter")
        shown.page.get_by_role("status").wait_for()
        shown.page.keyboard.press("Enter")
        shown.page.wait_for_url("**/rollouts/done")
        assert "by human" in shown.page.inner_text("main")
        assert [] == shown.errors
    assert "cancelled" in run_agl("show", "waits", "--store", "sqlite:///runs.db", folder=tmp_path)
