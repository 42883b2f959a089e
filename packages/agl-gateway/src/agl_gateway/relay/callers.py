"""Recognises coding agents by their usual headers and bodies: the agent, its session, and helper calls.

Claude Code, Codex, OpenCode, Qwen Code, Gemini CLI and Copilot CLI name themselves in ``user-agent`` or in a header of
their own; most also name their session and their sub-agents. Besides the turns of its task, such a program asks for
titles, summaries and memories. These helper calls get the role :data:`agl.semconv.HELPER`, and do not train.

:class:`Owners` finds the owner of a call: the attempt of its token, else a conversation.
"""

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

from agl import semconv
from agl.dialects import Request
from agl.errors import ConfigError
from agl.tracing import WHO_HEADER, decode_names
from agl_gateway.processes.attempt_facts import AttemptFacts
from agl_gateway.record.exchanges import CallContext, Origin
from agl_gateway.traffic.conversations import Conversations, agent_of, conversation_of, rollout_id_of, user_of
from agl_gateway.traffic.kept_traffic import NOT_RECORDED, KeptTraffic
from agl_gateway.wire.http.calls import EitherRequest
from agl_gateway.wire.translation import as_object, object_of, opening_of, text_in
from agl_run.access import AttemptToken

ROLE_HEADER = "x-agl-role"
"""Request header that names the role of a call; ``helper`` marks a helper call."""

_MAX_NAME = 80
_MAX_CLIENT = 200
_MAX_SESSION = 200
_MAX_METADATA = 16_384
_MAX_OPENING = 4_000
_MAX_ARGUMENTS = 256 * 1024
"""Bytes of a request above which its opening is not read: helper calls are short, and reading takes time."""

_SMALL = 1024
"""Output limit in tokens up to which a call without tools by a coding agent counts as a helper call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """A coding agent: its name, the header that identifies it, and the headers with its session and its sub-agent."""

    name: str
    shown_by: str
    pattern: re.Pattern[str]
    session: str = ""
    subagent: str = ""
    helpers: re.Pattern[str] | None = None


def _begins(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text), re.IGNORECASE)


_PROGRAMS = (
    _Program(
        name="claude-code",
        shown_by="user-agent",
        pattern=_begins("claude-cli/"),
        session="x-claude-code-session-id",
        subagent="x-claude-code-agent-id",
    ),
    _Program(name="codex", shown_by="user-agent", pattern=_begins("codex"), session="session-id"),
    _Program(
        name="opencode",
        shown_by="user-agent",
        pattern=_begins("opencode/"),
        session="x-session-id",
        subagent="x-parent-session-id",
    ),
    _Program(
        name="qwen-code",
        shown_by="user-agent",
        pattern=_begins("qwencode/"),
        helpers=re.compile(r"managed memory extraction subagent|suggest(?:ing)? (?:the )?next", re.IGNORECASE),
    ),
    _Program(name="gemini-cli", shown_by="user-agent", pattern=_begins("geminicli")),
    _Program(name="copilot-cli", shown_by="x-interaction-type", pattern=_begins("conversation-")),
)

_SUBAGENT = "subagent"
_COMPACTION = "compaction"
_SUMMARIZING = re.compile(
    r"context summari[sz]ation|summari[sz](?:es?|ing) (?:a|the|this|our) conversation|compact the conversation",
    re.IGNORECASE,
)
"""Matches the opening of a call that shortens a conversation; some programs send it without tools or earlier turns."""

_CODEX_METADATA = "x-codex-turn-metadata"
_CODEX_ROOT = "/root"
_CODEX_HELPERS = ("memory_consolidation",)
_UNKNOWN = Origin()


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperRules:
    """Finds helper calls: those of known coding agents, and those that the gateway's settings describe.

    Attributes:
        is_on: True to mark helper calls of known coding agents.
        match: Regular expression. A call whose prompt holds no answer of the model counts as a helper call if the
            expression matches in the first 4,000 characters of its opening. ``""`` matches nothing.

    Raises:
        ConfigError: ``match`` is not a regular expression.
    """

    is_on: bool = True
    match: str = ""

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ConfigError(
                f"helper_match = {self.match!r} is not a regular expression: {error}; escape special characters with "
                "a backslash"
            ) from error

    def origin_of(self, headers: Mapping[str, str], asked: Request, *, has_tracer: bool = False) -> Origin:
        """Return the origin of a call; with ``has_tracer``, only the session and the role from the request header."""
        program = _program_of(headers)
        found = _UNKNOWN if program is None else _described(program, headers)
        role = clean(headers.get(ROLE_HEADER, ""), _MAX_NAME)
        if has_tracer:
            return Origin(session=found.session, role=_known_role(role))
        if not role and asked.dialect != "embeddings":
            role = found.role or self._role(program, asked)
        return Origin(agent=found.agent, agent_id=found.agent_id, session=found.session, role=_known_role(role))

    def _role(self, program: _Program | None, asked: Request) -> str:
        if not self._is_helper(program, asked):
            return ""
        is_known = program is not None and len(asked.body) <= _MAX_ARGUMENTS
        return _COMPACTION if is_known and _SUMMARIZING.search(_text_of(opening_of(asked))) else "helper"

    def _is_helper(self, program: _Program | None, asked: Request) -> bool:
        is_known = self.is_on and program is not None
        if not (is_known or self.match) or not asked.is_object:
            return False
        has_tools = bool(asked.get("tools"))
        if is_known and not has_tools and 0 < _limit_of(asked) <= _SMALL:
            return True
        if len(asked.body) > _MAX_ARGUMENTS:
            return False
        opening = _text_of(opening_of(asked))
        helpers = program.helpers if is_known and program is not None else None
        if helpers is not None and helpers.search(opening):
            return True
        if _has_answer(asked):
            return False
        return (is_known and not has_tools) or bool(self.match and re.search(self.match, opening))


def session_of(headers: Mapping[str, str]) -> str:
    """Return the session id of a known coding agent, as ``AGENT:SESSION``; ``""`` if the headers name no session."""
    program = _program_of(headers)
    session = "" if program is None else _described(program, headers).session
    return f"{program.name}:{session}" if program is not None and session else ""


def clean(text: str, limit: int) -> str:
    """Return untrusted text without unprintable characters, cut to ``limit`` characters."""
    return "".join(letter for letter in text[: 4 * limit] if letter.isprintable()).strip()[:limit]


def _program_of(headers: Mapping[str, str]) -> _Program | None:
    return next((one for one in _PROGRAMS if one.pattern.match(headers.get(one.shown_by, ""))), None)


def _described(program: _Program, headers: Mapping[str, str]) -> Origin:
    session = clean(headers.get(program.session, ""), _MAX_SESSION) if program.session else ""
    if program.name == "codex":
        return _codex(headers, session)
    mark = clean(headers.get(program.subagent, ""), _MAX_SESSION) if program.subagent else ""
    agent = f"{program.name}/{_SUBAGENT}" if mark else program.name
    is_parent = program.subagent == "x-parent-session-id"
    return Origin(agent=agent, agent_id=session if mark and is_parent else mark, session=session)


def _codex(headers: Mapping[str, str], session: str) -> Origin:
    """Return the origin from Codex's JSON header; ``agent_name`` is a path from ``/root`` to a sub-agent."""
    given = headers.get(_CODEX_METADATA, "")
    about = object_of(given.encode("utf-8", "replace")) if len(given) <= _MAX_METADATA else {}
    path = clean(text_in(about.get("agent_name")), _MAX_NAME)
    below = path.removeprefix(_CODEX_ROOT).strip("/")
    mark = clean(headers.get("x-openai-subagent", ""), _MAX_NAME)
    kind = clean(text_in(about.get("request_kind")), _MAX_NAME)
    is_helper = mark in _CODEX_HELPERS or "x-openai-memgen-request" in headers
    role = "helper" if is_helper else _COMPACTION if kind == _COMPACTION else ""
    thread = clean(text_in(about.get("thread_id")), _MAX_SESSION)
    return Origin(
        agent=f"codex/{below or _SUBAGENT}" if below or mark == "collab_spawn" else "codex",
        agent_id=thread if below or mark else "",
        session=clean(text_in(about.get("session_id")), _MAX_SESSION) or session,
        role=role,
    )


def _known_role(role: str) -> str:
    return semconv.HELPER if role == "helper" else role


def _limit_of(asked: Request) -> int:
    found = (asked.get(key) for key in ("max_completion_tokens", "max_output_tokens", "max_tokens"))
    return next((value for value in found if isinstance(value, int)), 0)


def _has_answer(asked: Request) -> bool:
    """Return true if the prompt holds an answer of the model; only a conversation's first prompt holds none."""
    listed = asked.get("input" if asked.dialect == "responses" else "messages")
    items = cast("list[object]", listed) if isinstance(listed, list) else []
    return any(as_object(item).get("role") == "assistant" for item in items)


def _text_of(value: object) -> str:
    """Return the strings in a JSON value, joined, up to a limit of characters."""
    found, size, waiting = list[str](), 0, [value]
    while waiting and size < _MAX_OPENING:
        item = waiting.pop()
        if isinstance(item, str):
            found.append(item)
            size += len(item)
        elif isinstance(item, list):
            waiting += reversed(cast("list[object]", item))
        elif isinstance(item, dict):
            waiting += reversed([*cast("dict[str, object]", item).values()])
    return "\n".join(found)[:_MAX_OPENING]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The attempt or the conversation that a call belongs to.

    Attributes:
        headers: Headers to add to the response: the conversation's rollout, or the reason why it is not recorded.
        is_conversation: True for a conversation. Its calls are stored before their answers end, because no end of an
            attempt waits for them later.
        is_recorded: False for a conversation outside the recorded share.
    """

    rollout_id: str
    attempt_id: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    is_conversation: bool = False
    is_recorded: bool = True


def trace_of(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the trace id and span id of a W3C ``traceparent`` header; both are ``""`` if it is missing or invalid."""
    parts = headers.get("traceparent", "").split("-")
    is_valid = len(parts) >= 4 and _is_hex(parts[1], 32) and _is_hex(parts[2], 16)
    return (parts[1], parts[2]) if is_valid else ("", "")


def _is_hex(text: str, size: int) -> bool:
    return len(text) == size and bool(text.strip("0")) and all(letter in "0123456789abcdef" for letter in text)


def span_id_of(headers: Mapping[str, str]) -> str:
    """Return the framework span's id from ``x-agl-span-id``; ``""`` unless it is 16 hex digits."""
    text = headers.get("x-agl-span-id", "").lower()
    return text if _is_hex(text, 16) else ""


@dataclass(eq=False, kw_only=True)
class Owners:
    """Finds the owners of calls. Used in one event loop only.

    Attributes:
        conversations: Records calls without an attempt's token; ``None`` to refuse such calls.
        traffic: Decides which conversations are recorded; ``None`` to record all.
        helper_calls: The number of helper calls of coding agents.
    """

    facts: AttemptFacts
    helpers: HelperRules
    conversations: Conversations | None = None
    traffic: KeptTraffic | None = None
    helper_calls: int = field(default=0, init=False)

    @asynccontextmanager
    async def owner_of(self, request: EitherRequest, asked: Request, claim: AttemptToken) -> AsyncGenerator[Owner]:
        """Yield the owner of a call, found by its token; inside the block the conversation does not become idle.

        Raises:
            Problem: 400 for a call that should belong to a conversation but names none.
        """
        if claim.scope == "attempt" or self.conversations is None:
            yield Owner(rollout_id=claim.rollout_id, attempt_id=claim.attempt_id)
            return
        headers, user = request.headers, user_of(request.headers, asked)
        conversation = conversation_of(headers, asked, session=session_of(headers), user=user)
        if self.traffic is not None:
            left_out_by = await self.conversations.left_out_by(conversation, self.traffic)
            self.traffic.count(is_recorded=not left_out_by)
            if left_out_by:
                reason = {NOT_RECORDED: left_out_by}
                yield Owner(rollout_id=rollout_id_of(conversation), attempt_id="", headers=reason, is_recorded=False)
                return
        async with self.conversations.hold_open(conversation, user=user, agent=agent_of(headers)) as found:
            yield Owner(
                rollout_id=found.rollout_id,
                attempt_id=found.attempt_id,
                headers=found.headers(),
                is_conversation=True,
            )

    async def context_of(self, request: EitherRequest, asked: Request, owner: Owner) -> CallContext:
        """Return the context of a call; for a repeated request, the request's id may come from another process."""
        headers = request.headers
        request_id, retries = await self.facts.request_id(owner.attempt_id, headers, asked.body)
        trace_id, trace_parent = trace_of(headers)
        framework_span_id = span_id_of(headers)
        names = decode_names(headers.get(WHO_HEADER, ""))
        origin = self.helpers.origin_of(headers, asked, has_tracer=bool(names or framework_span_id))
        self.helper_calls += origin.role == semconv.HELPER
        return CallContext(
            rollout_id=owner.rollout_id,
            attempt_id=owner.attempt_id,
            request_id=request_id,
            retry_count=retries,
            trace_id=trace_id,
            parent_id=framework_span_id or trace_parent or None,
            framework_span_id=framework_span_id,
            names=names,
            client=headers.get("user-agent", "")[:_MAX_CLIENT],
            origin=origin,
        )

    def forget(self, owner: Owner) -> None:
        """Drop the owner's conversation from the cache, so that its next call reads the conversation from the store."""
        if self.conversations is not None:
            self.conversations.forget(owner.rollout_id)
