"""The actions of a console with an admin token: who may act, each action's effect, and the forms that are refused."""

import asyncio
import html
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, make_mocked_request

from agl.contracts import ExperimentRecord, RolloutQuery
from agl.errors import ConfigError
from agl.schemas import Outcome, PromptTemplate, ResourceVersion, Rollout
from agl.stores import MemoryStore
from agl_console.access import SESSION_S, TRIES, TRIES_S, Access, admin_token_of
from agl_console.actions import KINDS
from agl_inspect.keys import KeyFile
from agl_inspect.records.labels import move
from agl_store_sqlite._store import SQLiteStore

from .conftest import Open

TOKEN = "an-admin-token-of-the-tests"

ASKED = {
    "promote": {"name": "style", "version": "v2", "label": "production", "reason": "looks\nbetter \u202e"},
    "rollback": {"name": "style", "label": "best"},
    "cancel": {"rollout": "queued"},
    "rate": {"rollout": "over", "value": "0.25", "name": "taste", "comment": "<b>fine</b>\r\nreally"},
}


class Desk:
    """A signed-in browser over a separate store, with the clock of the sessions and the lines of the log."""

    def __init__(self, client: TestClient, store: Any, audit: list[str]) -> None:
        self.client = client
        self.store = store
        self.audit = audit
        self.origin = str(client.make_url("")).rstrip("/")

    async def post(self, path: str, fields: dict[str, str], **headers: str) -> tuple[int, str]:
        given = {"Origin": self.origin, "Sec-Fetch-Site": "same-origin", **headers}
        async with self.client.post(path, data=fields, headers=given, allow_redirects=False) as answer:
            return answer.status, await answer.text()

    async def sign_in(self, token: str = TOKEN, **fields: str) -> int:
        return (await self.post("/sign-in", {"token": token, **fields}))[0]

    async def ask(self, kind: str, **fields: str) -> tuple[int, str]:
        async with self.client.get(f"/actions/{kind}", params=fields, allow_redirects=False) as answer:
            return answer.status, html.unescape(await answer.text())

    async def form(self, kind: str, **fields: str) -> dict[str, str]:
        """Ask for an action, and return the fields of the form that confirms the action."""
        status, page = await self.ask(kind, **fields)
        assert 200 == status, page
        found = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page))
        assert "proof" in found, page
        return found

    async def act(self, kind: str, **fields: str) -> tuple[int, str]:
        status, page = await self.post(f"/actions/{kind}", await self.form(kind, **fields))
        return status, html.unescape(page)


async def fill(store: Any) -> None:
    """Add a finished and a queued rollout of a running experiment, and two versions with labels."""
    await store.save_state({}, experiment=ExperimentRecord(name="lab"))
    pinned = {"experiment": "lab", "resources": {"style": "v1"}, "hidden": ("answer",)}
    await store.enqueue([Rollout(rollout_id="over", task={"n": 1, "answer": 2}, metadata={"step": 3}, **pinned)])
    (claim,) = await store.claim(worker="w", experiment="lab")
    await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")])
    await store.enqueue([Rollout(rollout_id="queued", task=2, **pinned), Rollout(rollout_id="lonely", task=3)])
    await store.publish(
        [
            ResourceVersion(name="style", version=version, resource=PromptTemplate(template=version))
            for version in ("v1", "v2")
        ]
    )
    for label, version in (("production", "v1"), ("best", "v1"), ("best", "v2")):
        await move(store, "style", label, version)


@pytest.fixture
def desk(opened: Open, tmp_path: Path) -> Any:
    """Return a function that opens a console with actions over a new SQLite store."""

    @asynccontextmanager
    async def use(**given: Any) -> AsyncIterator[Desk]:
        store = SQLiteStore(f"sqlite:///{tmp_path / 'actions.db'}")
        await fill(store)
        lines: list[str] = []
        access = given.pop("access", None) or Access(TOKEN)
        async with opened(store, access=access, audit=lines.append, **given) as client:
            yield Desk(client, store, lines)
        await store.close()

    return use


async def state(store: Any) -> Any:
    """Return everything that the actions can change."""
    rollouts = await store.rollouts(RolloutQuery())
    spans = [await store.spans(rollout.rollout_id) for rollout in rollouts]
    return rollouts, spans, await store.labels("style")


@pytest.mark.parametrize("kind", KINDS)
async def test_console_without_a_token_refuses_every_action(opened: Open, kind: str) -> None:
    store = MemoryStore()
    async with opened(store) as client:
        answer = await client.post(f"/actions/{kind}", data=ASKED[kind])
        assert (403, True) == (answer.status, "--actions" in await answer.text())
        assert 404 == (await client.get(f"/actions/{kind}")).status
        assert "ign in" not in await (await client.get("/versions")).text()


@pytest.mark.parametrize("kind", KINDS)
async def test_stranger_is_sent_to_sign_in_and_cannot_act_with_a_form_of_another_session(desk: Any, kind: str) -> None:
    async with desk() as here:
        before = await state(here.store)
        assert 303 == (await here.ask(kind, **ASKED[kind]))[0]
        assert 303 == await here.sign_in()
        form = await here.form(kind, **ASKED[kind])
        assert 403 == (await here.post(f"/actions/{kind}", {**form, "proof": "0" * 64}))[0]
        assert 403 == (await here.post(f"/actions/{kind}", {k: v for k, v in form.items() if k != "proof"}))[0]
        assert 403 == (await here.post(f"/actions/{kind}", {**form, "key": "0" * 16}))[0]
        assert 403 == (await here.post(f"/actions/{kind}", {**form, "seen": "other"}))[0]
        assert 303 == (await here.post("/sign-out", {}))[0]
        assert 403 == (await here.post(f"/actions/{kind}", form))[0]
        assert 303 == await here.sign_in()
        assert 403 == (await here.post(f"/actions/{kind}", form))[0]
        assert before == await state(here.store)
        assert any(f"refused {kind}" in line for line in here.audit)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "evil.example"},
    ],
)
async def test_form_from_another_origin_is_refused(desk: Any, headers: dict[str, str]) -> None:
    async with desk() as here:
        await here.sign_in()
        before, form = await state(here.store), await here.form("cancel", rollout="queued")
        assert 403 == (await here.post("/actions/cancel", form, **headers))[0]
        assert 403 == (await here.post("/sign-in", {"token": TOKEN}, **headers))[0]
        assert before == await state(here.store)


async def test_form_without_a_word_of_its_origin_is_refused(desk: Any) -> None:
    async with desk() as here:
        await here.sign_in()
        form = await here.form("cancel", rollout="queued")
        assert 403 == (await here.client.post("/actions/cancel", data=form)).status


async def test_cookie_is_for_this_process_and_hidden_from_scripts_and_other_sites(desk: Any) -> None:
    async with desk() as here:
        headers = {"Origin": here.origin}
        given = {"token": TOKEN, "next": "//evil.example/"}
        answer = await here.client.post("/sign-in", data=given, headers=headers, allow_redirects=False)
        assert (303, "/") == (answer.status, answer.headers["Location"])
        cookie = answer.headers["Set-Cookie"]
        assert re.match(r"agl-console-[0-9a-f]{8}=", cookie)
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
        assert TOKEN not in cookie
        answer = await here.client.post(
            "/sign-in", data={**given, "next": "/rollouts?a=1"}, headers=headers, allow_redirects=False
        )
        assert "/rollouts?a=1" == answer.headers["Location"]


async def test_wrong_tokens_are_limited_and_sessions_end(desk: Any) -> None:
    now = [0.0]
    async with desk(access=Access(TOKEN, clock=lambda: now[0])) as here:
        for _ in range(TRIES):
            assert 403 == await here.sign_in("wrong")
        assert 429 == await here.sign_in()
        now[0] += TRIES_S + 1
        assert 303 == await here.sign_in()
        assert 200 == (await here.ask("cancel", rollout="queued"))[0]
        now[0] += SESSION_S + 1
        assert 303 == (await here.ask("cancel", rollout="queued"))[0]


async def test_version_is_promoted_with_its_reason(desk: Any) -> None:
    async with desk() as here:
        await here.sign_in()
        _, page = await here.ask("promote", name="style", version="v2")
        assert 'name="label" value="production"' in page
        _, page = await here.ask("promote", **ASKED["promote"])
        assert "production of style points at the version v1; it will point at the version v2" in page
        status, page = await here.act("promote", **ASKED["promote"])
        assert (200, True) == (status, "production is now v2" in page)
        assert ASKED["promote"]["reason"] == (await here.store.label_moves("style", "production"))[-1].reason
        assert re.fullmatch(
            r'session [0-9a-f]{8}: promote \{.*"v2".*\}: done: style: production is now v2', here.audit[-1]
        )


async def test_label_rolls_back_once_however_often_the_form_is_sent(desk: Any) -> None:
    async with desk() as here:
        await here.sign_in()
        form = await here.form("rollback", name="style", label="best")
        answers = await asyncio.gather(*[here.post("/actions/rollback", form) for _ in range(4)])
        assert {200} == {status for status, _ in answers}
        assert 3 == sum("was sent before" in page for _, page in answers)
        moves = await here.store.label_moves("style", "best")
        assert ["v1", "v2", "v1"] == [move.version for move in moves]
        assert "pointed at nothing before" in (await here.ask("rollback", name="style", label="best"))[1]


@pytest.mark.parametrize(("kind", "label"), [("promote", "best"), ("rollback", "best")])
async def test_label_that_moved_since_the_question_stays(desk: Any, kind: str, label: str) -> None:
    async with desk() as here:
        await here.sign_in()
        fields = {"name": "style", "label": label, **({"version": "v1"} if kind == "promote" else {})}
        form = await here.form(kind, **fields)
        await here.store.publish([ResourceVersion(name="style", version="v3", resource=PromptTemplate(template="v3"))])
        await move(here.store, "style", label, "v3")
        status, page = await here.post(f"/actions/{kind}", form)
        assert (400, True) == (status, "has moved since the question" in page)
        assert "v3" == (await here.store.label_moves("style", label))[-1].version


async def test_rollout_is_cancelled_and_a_finished_one_is_not(desk: Any) -> None:
    async with desk() as here:
        await here.sign_in()
        form = await here.form("cancel", rollout="queued")
        assert 200 == (await here.post("/actions/cancel", form))[0]
        (rollout,) = await here.store.rollouts(RolloutQuery(ids=("queued",)))
        assert "cancelled" == rollout.status
        status, page = await here.ask("cancel", rollout="over")
        assert (400, True) == (status, "has ended (succeeded)" in page)
        late = await here.form("cancel", rollout="lonely")
        (claim,) = await here.store.claim(worker="w", experiment="")
        await here.store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status="succeeded")])
        status, page = await here.post("/actions/cancel", late)
        assert (400, True) == (status, "it has ended (succeeded)" in page)


async def test_late_reward_decides_and_keeps_its_words(desk: Any) -> None:
    async with desk() as here:
        await here.sign_in()
        _, page = await here.ask("rate", rollout="over")
        assert 'name="value"' in page
        form = await here.form("rate", **ASKED["rate"])
        for _ in range(2):
            status, page = await here.post("/actions/rate", {k: html.unescape(v) for k, v in form.items()})
            assert (200, True) == (status, "the reward that counts is 0.25" in page)
        (span,) = await here.store.spans("over")
        assert (0.25, "taste", "human") == (span.reward.value, span.reward.name, span.reward.source)
        assert "<b>fine</b>\nreally" == span.reward.feedback


async def test_note_without_a_reward_stands_with_the_rollout_and_its_tags_filter(desk: Any) -> None:
    async with desk() as here:
        await here.sign_in()
        form = await here.form("rate", rollout="over", comment="#slow: asks twice #loop")
        for _ in range(2):
            status, page = await here.post("/actions/rate", {k: html.unescape(v) for k, v in form.items()})
            assert (200, True) == (status, "over has the note" in page)
        assert [] == await here.store.spans("over")
        assert 1 == len(await here.store.spans("over", attempt_id=""))

        async def page_of(address: str) -> str:
            return html.unescape(await (await here.client.get(address)).text())

        for address in ("/rollouts/over", "/rollouts", "/rollouts?note=%23LOOP"):
            assert '</a>: asks twice <a href="/rollouts?experiment=lab&note=%23loop">#loop</a>' in await page_of(
                address
            )
        assert "asks twice" in await page_of("/rollouts?note=%23slow")
        for other in ("%23other", "%23loo"):
            assert "No rollout fits" in await page_of(f"/rollouts?note={other}")
        assert "recorded from outside" not in await page_of("/rollouts/over")


async def test_note_alone_needs_no_second_page_and_gives_no_reward(desk: Any) -> None:
    async with desk() as here:
        await here.sign_in()
        _, page = await here.ask("rate", rollout="over")
        assert 'name="proof"' not in page  # it would stand in the address that asks for confirmation
        (alone,) = re.findall(r'name="alone" value="([^"]+)"', page)
        filled = {"rollout": "over", "comment": "asks twice", "value": "1", "alone": alone}
        assert 403 == (await here.post("/actions/rate", {**filled, "rollout": "waits"}))[0]
        assert 403 == (await here.post("/actions/rate", {**filled, "alone": alone[:-1]}))[0]
        status, page = await here.post("/actions/rate", filled)
        assert (200, True) == (status, "over has the note" in page)
        assert [] == await here.store.spans("over")
        assert 1 == len(await here.store.spans("over", attempt_id=""))


async def test_note_with_a_reward_is_its_feedback_too(desk: Any) -> None:
    async with desk() as here:
        await here.sign_in()
        status, page = await here.act("rate", rollout="over", value="0", comment="wrong #tool")
        assert (200, True) == (status, "the reward that counts is 0" in page)
        (reward,) = await here.store.spans("over")
        (note,) = await here.store.spans("over", attempt_id="")
        assert ("wrong #tool", "wrong #tool") == (reward.reward.feedback, note.attributes["agl.message"])


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("rate", {"rollout": "over", "value": "nan"}, "finite number"),
        ("rate", {"rollout": "over", "value": "good"}, "Expected `float | null`"),
        ("rate", {"rollout": "queued", "value": "1"}, "once it is finished"),
        ("rate", {"rollout": "nobody", "value": "1"}, "unknown rollout 'nobody'"),
        ("rate", {}, "lacks rollout"),
        ("rate", {"rollout": "over", "name": "taste"}, "give a reward, a note, or both"),
        ("promote", {"name": "style", "version": "v9", "label": "production"}, "unknown version 'style@v9'"),
        ("promote", {"name": "style", "version": "v1", "label": "production"}, "points at 'v1' already"),
        ("promote", {"name": "style", "version": "v1", "label": "a/b"}, "may hold letters"),
        ("rollback", {"name": "style", "label": "nothing"}, "unknown label 'style/nothing'"),
        ("cancel", {"rollout": "over", "other": "1"}, "unknown field"),
        ("explode", {}, "there is no action of this name"),
    ],
)
async def test_impossible_action_is_refused_in_words(
    desk: Any, kind: str, fields: dict[str, str], expected: str
) -> None:
    async with desk() as here:
        await here.sign_in()
        status, page = await here.ask(kind, **fields)
        assert status in (400, 404)
        assert expected in page


async def test_pages_offer_what_can_be_done(desk: Any) -> None:
    async with desk() as here:

        async def page(address: str) -> str:
            return html.unescape(await (await here.client.get(address)).text())

        assert "Sign in" in await page("/rollouts/over")
        await here.sign_in()
        assert "/actions/rate?rollout=over" in await page("/rollouts/over")
        assert "/actions/cancel?rollout=queued" in await page("/rollouts/queued")
        shown = await page("/versions/style?version=v2")
        assert "/actions/promote?name=style&version=v2" in shown
        assert "/actions/rollback?name=style&label=best" in shown
        assert "Sign out" in shown


def test_token_is_made_kept_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_TOKEN", raising=False)
    path = tmp_path / "state" / "token"
    token, source = admin_token_of(path)
    again, _ = admin_token_of(path)
    assert str(path) == source
    assert callable(token)
    assert callable(again)
    assert token() == again()
    assert 0o600 == path.stat().st_mode & 0o777
    os.chmod(path, 0o644)
    with pytest.raises(ConfigError, match="can be read by other users"):
        admin_token_of(path)
    monkeypatch.setenv("AGL_TOKEN", TOKEN)
    assert (TOKEN, "the environment variable AGL_TOKEN") == admin_token_of(path)
    monkeypatch.setenv("AGL_TOKEN", f"{TOKEN}\n")
    assert TOKEN == admin_token_of(path)[0]
    monkeypatch.setenv("AGL_TOKEN", "short")
    with pytest.raises(ConfigError, match="fewer than 16"):
        admin_token_of(path)


def test_session_ends_with_the_token_that_opened_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    old, new = f"{TOKEN}-old", f"{TOKEN}-new"

    def write(*tokens: str) -> None:
        path.with_name("draft").write_text("\n".join(tokens))
        path.with_name("draft").chmod(0o600)
        path.with_name("draft").replace(path)

    write(old)
    access = Access(KeyFile(path, purpose="admin token"))

    def request(secret: str | None) -> web.Request:
        return make_mocked_request("GET", "/", headers={"Cookie": f"{access.cookie}={secret}"})

    write(new, old)
    sessions = {token: request(access.sign_in(token)) for token in (old, new)}
    assert access.session(sessions[old]) is not None
    write(new)
    assert access.session(sessions[old]) is None
    assert access.session(sessions[new]) is not None
    assert access.sign_in(old) is None
