"""Serves the views of a store over HTTP, and the actions if there is an admin token."""

import asyncio
import time
from collections.abc import Collection
from importlib.resources import files
from pathlib import Path

from aiohttp import web

from agl.contracts import Store
from agl.errors import AglError
from agl.schemas import to_json
from agl_console.access import Access
from agl_console.acting import Actions, Audit
from agl_console.guard import METRICS, Guard, add_headers
from agl_console.pages import Pages, page_response, status_of
from agl_console.views import read_view
from agl_console.vocabulary import Vocabularies, Vocabulary
from agl_inspect.advice.suggestions import read_alerts

FEEDS = 32
"""The most pages that may wait for changes at a time."""

_PAUSE_S = 1.0
"""Seconds between two change events."""

_WAIT_S = 15.0
_JSON = "application/json"
_SHOWN_MEDIA = frozenset(
    {"image/png", "image/jpeg", "image/gif", "image/webp", "audio/mpeg", "audio/ogg", "audio/flac", "audio/wav"}
)
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def make_app(
    store: Store,
    *,
    name: str,
    hosts: Collection[str] = (),
    password: str = "",
    vocabulary: Vocabulary | None = None,
    access: Access | None = None,
    audit: Audit | None = None,
) -> web.Application:
    """Create the console's application, which leaves ``store`` open.

    Args:
        store: The store to read, and to act on.
        name: The store's address, as pages show it.
        hosts: Further host names of the console.
        password: Required at every request; ``""`` for no password.
        vocabulary: The texts of tokens; by default those of each policy's own weights.
        access: The sessions of users who may act; ``None`` for a console that only reads.
        audit: Takes a line for each action; by default the logger ``agl_console``.
    """
    app = web.Application(middlewares=[Guard(hosts=hosts, password=password).middleware()])
    pages = Pages(name)
    actions = Actions(store, pages, access, audit)
    console = _Console(store, pages, actions, Vocabularies(vocabulary))
    app.router.add_static("/static", Path(str(files("agl_console"))) / "static")
    app.router.add_get("/changes", console.changes)
    app.router.add_get(METRICS, console.metrics)
    app.router.add_get("/media/{digest}", console.media)
    actions.add_to(app)
    app.router.add_get("/{path:.*}", console.view)
    app.on_response_prepare.append(add_headers)
    return app


class _Console:
    def __init__(self, store: Store, pages: Pages, actions: Actions, vocabularies: Vocabularies) -> None:
        self._store = store
        self._actions = actions
        self._vocabularies = vocabularies
        self._pages = pages
        self._feeds = 0

    async def view(self, request: web.Request) -> web.Response:
        """Answer with a view: as JSON for ``format=json``, as a page otherwise."""
        is_json = request.query.get("format") == "json"
        query = {name: request.query.getall(name) for name in request.query if name != "format"}
        try:
            view = await read_view(self._store, request.rel_url.raw_path, query, self._vocabularies)
        except AglError as error:
            return self._error(request, error, is_json=is_json)
        if is_json:
            return web.Response(body=to_json(view.data), content_type=_JSON)
        return page_response(self._pages.view(view, request.raw_path, self._actions.visitor(request)))

    async def metrics(self, _request: web.Request) -> web.Response:
        """Answer Prometheus with the findings in the store's runs."""
        return web.Response(text=await findings_text(self._store), headers={"Content-Type": _PROMETHEUS})

    async def media(self, request: web.Request) -> web.Response:
        """Answer with a blob: pictures and sounds as such, anything else as a file to save."""
        found = await self._store.blobs([request.match_info["digest"]])
        if not found:
            return web.Response(status=404, text="the store has no such blob; it goes with its last rollout\n")
        (blob,) = found
        headers = {"Cache-Control": "private, max-age=86400, immutable"}
        if blob.media_type in _SHOWN_MEDIA:
            return web.Response(body=blob.data, content_type=blob.media_type, headers=headers)
        headers["Content-Disposition"] = "attachment"
        return web.Response(body=blob.data, content_type="application/octet-stream", headers=headers)

    async def changes(self, request: web.Request) -> web.StreamResponse:
        """Send an event soon after each change in the store, by its change feed, until the client leaves."""
        if self._feeds >= FEEDS:
            return web.Response(status=503, text=f"{FEEDS} pages wait for changes already; close some\n")
        self._feeds += 1
        try:
            return await self._feed(request)
        except ConnectionError:
            return web.Response()  # the client left
        finally:
            self._feeds -= 1

    async def _feed(self, request: web.Request) -> web.StreamResponse:
        """Send an event after changes, and one more when no others follow.

        The extra event covers data that is not in the feed: metrics, the ends of runs, and changes before the page
        began to listen.
        """
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        cursor, is_due = await self._store.cursor(), True
        while True:
            changes = await self._store.changes(after=cursor, wait_s=_WAIT_S)
            cursor = changes[-1].cursor if changes else cursor
            await response.write(f"data: {cursor}\n\n".encode() if changes or is_due else b":\n\n")
            is_due = bool(changes)
            await asyncio.sleep(_PAUSE_S)

    def _error(self, request: web.Request, error: AglError, *, is_json: bool) -> web.Response:
        status, title = status_of(error)
        if is_json:
            return web.Response(status=status, body=to_json({"error": str(error)}), content_type=_JSON)
        return page_response(self._pages.error(title, str(error), self._actions.visitor(request)), status=status)


RECENT_S = 3600.0
"""Seconds for which a finding is shown."""

_NAME = "agl_run_finding_time_seconds"
_HEAD = (
    f"# HELP {_NAME} When a rule found something in a run that has not ended, or the run acted upon a collapse.\n"
    f"# TYPE {_NAME} gauge\n"
)


async def findings_text(store: Store) -> str:
    """Return the findings of the last hour in unfinished runs, with the Unix time of each as its value.

    If a rule found something several times, one line has the newest time, because Prometheus rejects duplicate series.
    """
    now = time.time()
    found: dict[str, float] = {}
    for record in await store.experiments():
        if record.status == "finished":
            continue
        for alert in await read_alerts(store, record.name, record.run):
            if now - alert.time < RECENT_S:
                labels = {
                    "experiment": record.name,
                    "run": str(record.run),
                    "algorithm": alert.found.algorithm,
                    "rule": alert.found.rule,
                    "kind": alert.kind,
                }
                shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
                found[shown] = alert.time
    return _HEAD + "".join(f"{_NAME}{{{labels}}} {at:.3f}\n" for labels, at in found.items())


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
