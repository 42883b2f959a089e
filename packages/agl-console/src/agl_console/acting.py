"""Serves sign-in and the actions.

For each action, a page asks for confirmation. Its form is accepted only from the session that it was made for. Then a
page shows the outcome.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
from aiohttp import web

from agl.contracts import Store
from agl.errors import AglError, ConfigError, NotFoundError
from agl.schemas import to_json
from agl_console.access import SESSION_S, Access, Session, is_own
from agl_console.actions import KINDS, Action, Done, Kind
from agl_console.pages import Pages, link, page_response, status_of
from agl_console.views import parsed
from agl_inspect.text import visible

Audit = Callable[[str], None]
"""A function that takes one log line for each action and each sign-in attempt."""

REMEMBERED = 1000
"""The number of forms whose outcome is remembered; a form that is sent again does not act again."""

_LOGGED = 600
"""The most characters of a form's fields in a log line."""

_KEY = re.compile("[0-9a-f]{16}")
_LOCAL = re.compile(r"/(?:[!-.0-\[\]-~][!-\[\]-~]*)?")
"""Matches a path on this console: without spaces and backslashes, and never ``//``, which would name another host."""


class Actions:
    """The handlers of all requests that change the store.

    Args:
        store: The store to act on.
        pages: Renders the pages.
        access: The sessions of signed-in users; ``None`` refuses everybody.
        audit: Takes a line for each action; by default the logger ``agl_console``.
    """

    def __init__(self, store: Store, pages: Pages, access: Access | None, audit: Audit | None = None) -> None:
        self._store = store
        self._pages = pages
        self._access = access
        self._audit = audit or logging.getLogger("agl_console").info
        self._made: dict[str, asyncio.Task[Done]] = {}

    def add_to(self, app: web.Application) -> None:
        """Add the routes of sign-in and of the actions; without ``access``, only the route that refuses every POST."""
        if self._access is not None:
            app.router.add_get("/sign-in", self.ask_token)
            app.router.add_post("/sign-in", self.sign_in)
            app.router.add_post("/sign-out", self.sign_out)
            app.router.add_get("/actions/{kind}", self.ask)
            app.router.add_post("/actions/{kind}", self.act)
        app.router.add_post("/{path:.*}", self.refuse)
        app.on_cleanup.append(self._settle)

    def visitor(self, request: web.Request) -> str:
        """Return ``signed`` for a request with a session, ``guest`` for others, and ``""`` if nobody can act."""
        if self._access is None:
            return ""
        return "guest" if self._access.session(request) is None else "signed"

    async def refuse(self, _request: web.Request) -> web.Response:
        """Refuse a POST to an address that has no action."""
        text = "there is no action here\n"
        if self._access is None:
            text = "this console only reads; start it with --actions, and sign in with the admin token, to act\n"
        return web.Response(status=403, text=text)

    async def ask_token(self, request: web.Request) -> web.Response:
        """Show the form that asks for the admin token."""
        return self._token_page(request, request.query.get("next", ""))

    async def sign_in(self, request: web.Request) -> web.Response:
        """Exchange the admin token for a session cookie."""
        access, form = self._known(), await _form(request)
        if wait := access.wait_s():
            text = f"Too many wrong tokens; try again in {wait:.0f} seconds."
            answer = self._token_page(request, form.get("next", ""), text, status=429)
            answer.headers["Retry-After"] = f"{wait + 1:.0f}"
            return answer
        secret = access.sign_in(form.get("token", ""))
        if secret is None:
            self._audit(f"a wrong token came from {request.remote}")
            text = "This is not the admin token. It stands where `agl console` said when it started."
            return self._token_page(request, form.get("next", ""), text, status=403)
        self._audit(f"somebody signed in from {request.remote}")
        answer = _moved(form.get("next", ""))
        answer.set_cookie(
            access.cookie, secret, max_age=int(SESSION_S), httponly=True, samesite="Strict", secure=request.secure
        )
        return answer

    async def sign_out(self, request: web.Request) -> web.Response:
        """End the session."""
        access = self._known()
        await _form(request)
        access.sign_out(request)
        answer = _moved("/")
        answer.del_cookie(access.cookie)
        return answer

    async def ask(self, request: web.Request) -> web.Response:
        """Show the action's form until it is filled in; then describe the action and ask for confirmation."""
        session = self._known().session(request)
        if session is None:
            return _moved(link("sign-in", next=request.raw_path))
        name, kind = self._kind(request)
        given = {key: _lines(value) for key, value in request.query.items() if value}
        if kind.fields and not any(field.name in given for field in kind.fields):
            return self._fields_page(session, name, kind, given)
        try:
            action: Action = parsed({key: [value] for key, value in given.items()}, kind.form)
            lines, state = await action.describe(self._store)
        except AglError as error:
            if kind.fields and isinstance(error, ConfigError):
                return self._fields_page(session, name, kind, given, error=str(error))
            return self._error(request, error)
        fields = {**given, **{key: value for key, value in state.items() if value}, "key": secrets.token_hex(8)}
        hidden = {**fields, "proof": session.proof(name, fields)}
        page = self._pages.render(
            "action.html",
            visitor="signed",
            name=name,
            kind=kind,
            lines=lines,
            hidden=hidden,
            back=link(*action.back()),
        )
        return page_response(page)

    async def act(self, request: web.Request) -> web.Response:
        """Perform the action of the form; the same form never acts twice."""
        access, form = self._known(), await _form(request)
        name, kind = self._kind(request)
        session = access.session(request)
        proof, offered = form.pop("proof", ""), form
        if kind.alone and (alone := form.pop("alone", "")):  # the first page offered it, and no second one asks
            key, _, proof = alone.partition(" ")
            asked = {field.name for field in kind.fields}
            offered = {**{name: value for name, value in form.items() if name not in asked}, "key": key}
            form = {**offered, kind.alone: form.get(kind.alone, "")}
        if session is None or not session.is_proven(name, offered, proof) or not _KEY.fullmatch(form.get("key", "")):
            self._audit(f"refused {name}: the form is not one of this session, from {request.remote}")
            text = (
                "This form is not of your session, which may have ended. Nothing was changed: sign in, and ask again."
            )
            return page_response(self._pages.error("Refused", text, visitor=self.visitor(request)), status=403)
        key, seen = form.pop("key"), form.pop("seen", "")
        is_again = key in self._made
        try:
            action: Action = parsed({field: [value] for field, value in form.items()}, kind.form)
            if not is_again:
                self._remember(key, self._perform(session, name, action, seen=seen, key=key))
            done = await asyncio.shield(self._made[key])  # goes on if the client disconnects
        except AglError as error:
            return self._error(request, error)
        page = self._pages.render(
            "action_done.html",
            visitor="signed",
            title=kind.title,
            text=done.text,
            is_again=is_again,
            back=link(*done.address),
        )
        return page_response(page)

    async def _perform(self, session: Session, name: str, action: Action, *, seen: str, key: str) -> Done:
        said = visible(to_json(action).decode())[:_LOGGED]
        try:
            done = await action.perform(self._store, seen=seen, key=key)
        except Exception as error:
            self._audit(visible(f"session {session.name}: {name} {said}: failed: {error}"))
            raise
        self._audit(visible(f"session {session.name}: {name} {said}: done: {done.text}"))
        return done

    def _remember(self, key: str, work: Coroutine[Any, Any, Done]) -> None:
        while len(self._made) >= REMEMBERED:
            del self._made[next(iter(self._made))]
        self._made[key] = task = asyncio.create_task(work)

        def forget(ended: asyncio.Task[Done]) -> None:
            if ended.cancelled() or ended.exception() is not None:
                self._made.pop(key, None)  # so that the form can be sent again

        task.add_done_callback(forget)

    async def _settle(self, _app: web.Application) -> None:
        """Wait for running actions before the store closes."""
        await asyncio.gather(*self._made.values(), return_exceptions=True)

    def _known(self) -> Access:
        assert self._access is not None  # noqa: S101  # the routes exist with access only
        return self._access

    def _kind(self, request: web.Request) -> tuple[str, Kind]:
        name = request.match_info["kind"]
        if name not in KINDS:
            raise web.HTTPNotFound(text=f"there is no action of this name; there are {', '.join(KINDS)}\n")
        return name, KINDS[name]

    def _token_page(self, request: web.Request, then: str, error: str = "", *, status: int = 200) -> web.Response:
        kept = then if _LOCAL.fullmatch(then) else ""
        page = self._pages.render("sign_in.html", visitor=self.visitor(request), then=kept, error=error)
        return page_response(page, status=status)

    def _fields_page(
        self, session: Session, name: str, kind: Kind, given: Mapping[str, str], *, error: str = ""
    ) -> web.Response:
        asked = {field.name for field in kind.fields}
        needed = {field.encode_name for field in msgspec.structs.fields(kind.form) if field.required} - asked
        hidden = {key: value for key, value in given.items() if key not in asked}
        if missing := sorted(needed - given.keys()):
            text = f"The address lacks {', '.join(missing)}; follow the link on the page of a rollout or a version."
            return page_response(self._pages.error(kind.title, text, visitor="signed"), status=400)
        key = secrets.token_hex(8)
        alone = f"{key} {session.proof(name, {**hidden, 'key': key})}" if kind.alone else ""
        values = {field.name: given.get(field.name, field.default) for field in kind.fields}
        page = self._pages.render(
            "action_fields.html",
            visitor="signed",
            name=name,
            kind=kind,
            hidden=hidden,
            values=values,
            alone=alone,
            error=error,
        )
        return page_response(page, status=400 if error else 200)

    def _error(self, request: web.Request, error: AglError) -> web.Response:
        status, _ = status_of(error)
        title = "Not found" if isinstance(error, NotFoundError) else "Not done"
        return page_response(self._pages.error(title, str(error), visitor=self.visitor(request)), status=status)


async def _form(request: web.Request) -> dict[str, str]:
    """Return the fields of a form that a page of this console sent; answer 403 to any other."""
    if not is_own(request):
        text = "only a page of this console may send this; nothing was changed\n"
        raise web.HTTPForbidden(text=text)
    try:
        found = await request.post()
    except (ValueError, LookupError) as error:  # a body that is no form, or text in an unknown charset
        raise web.HTTPBadRequest(text="this is not a form\n") from error
    return {key: _lines(value) for key, value in found.items() if isinstance(value, str) and value}


def _lines(text: str) -> str:
    """Replace the line ends that browsers send (CR LF or CR) by line feeds."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _moved(to: str) -> web.Response:
    place = to if _LOCAL.fullmatch(to) else "/"
    return web.Response(status=303, headers={"Location": place, "Cache-Control": "no-store"})
