"""Generates recorded rollouts with agents, branches, tools, sub-agents, odd texts, late rewards and failures."""

from typing import Any

from hypothesis import strategies as st

from agl import semconv
from agl.contracts import Recording
from agl.schemas import Attempt, ModelCall, Reward, Rollout, Span, pack_floats, pack_ids
from agl.tracing import chat_spans, make_reward_span

START_NS = 1_700_000_000_000_000_000
AGENTS = ("planner", "writer", "der Prüfer", "")
TEXTS = st.text(alphabet=st.sampled_from(["a", "b", " ", "\n", "\x00", '"', "\\", "é", "😀", "\ud800"]), max_size=8)
LOGPROB = st.floats(min_value=-8, max_value=0, width=32)


def call_span(span_id: str, call: ModelCall, *, parent: str, at_ns: int, attempt: str = "ro-1.1") -> Span:
    """Return the span of a model call that took one millisecond."""
    (span,) = chat_spans(
        [call],
        rollout_id="ro-1",
        attempt_id=attempt,
        trace_id="",
        parent_id=parent,
        framework_span_id="",
        start_ns=at_ns,
        end_ns=at_ns + 1_000_000,
    )
    return replaced(span, span_id=span_id)


def replaced(record: Any, **fields: Any) -> Any:
    """Return the record with fields replaced."""
    from msgspec.structs import replace

    return replace(record, **fields)


class World:
    """Draws one rollout, in which each call starts a conversation or continues an earlier one."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.spans: list[Span] = []
        self.known: list[tuple[str, list[int], list[dict[str, Any]]]] = []
        self.calls: list[str] = []
        self.tools: list[tuple[str, str]] = []
        self.now = START_NS
        self.agents: dict[str, str] = {}

    def tick(self) -> int:
        self.now += 1_000_000
        return self.now

    def add(self, span: Span) -> None:
        self.spans.append(replaced(span, sequence=len(self.spans) + 1))

    def new_id(self) -> str:
        return f"{len(self.spans) + 1:016x}"

    def other(self, name: str, parent: str, **attributes: Any) -> str:
        own = self.new_id()
        span = Span(rollout_id="ro-1", attempt_id="ro-1.1", span_id=own, name=name, parent_id=parent or None)
        at_ns = self.tick()
        self.add(replaced(span, start_ns=at_ns, end_ns=at_ns + 1, attributes=attributes))
        return own

    def place(self, agent: str) -> str:
        """Return the parent span for an agent's call: a span of the agent, below the root or below an earlier tool."""
        if agent not in self.agents or (self.tools and self.draw(st.booleans())):
            parent = self.draw(st.sampled_from([self.agents[""], *(tool for tool, _ in self.tools)]))
            named = {semconv.OPERATION: semconv.OP_INVOKE_AGENT, semconv.AGENT_NAME: agent} if agent else {}
            self.agents[agent] = self.other("invoke_agent", parent, **named) if agent else self.agents[""]
        return self.agents[agent]

    def call(self) -> None:
        draw = self.draw
        agent = draw(st.sampled_from(AGENTS))
        parent = self.place(agent)
        role = {"role": "user", "content": draw(TEXTS)}
        context, messages = [1, *draw(st.lists(st.integers(0, 9), max_size=3))], [role]
        if self.known and draw(st.booleans()):
            _, context, messages = draw(st.sampled_from([k for k in self.known if k[0] == agent] or self.known))
            context = [*context, *draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))]
            asked = messages[-1].get("tool_calls")
            answer = {"role": "tool", "tool_call_id": asked[0]["id"], "content": draw(TEXTS)} if asked else role
            messages = [*messages, answer]
        own = self.new_id()
        said: dict[str, Any] = {"role": "assistant", "content": draw(TEXTS)}
        if draw(st.booleans()):
            arguments = draw(st.sampled_from(["{}", '{"a": [1, null]}', "no json", "[1]"]))
            function = {"name": draw(st.sampled_from(["look_up", ""])), "arguments": arguments}
            said["tool_calls"] = [{"id": f"call-{own}", "type": "function", "function": function}]
        ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))
        kind = draw(st.sampled_from(["", "", "", "", "text", "failed", "cut"]))
        self.record(own, parent, kind, context, ids, {"messages": messages}, said)
        if kind in ("", "text"):
            self.known.append((agent, [*context, *ids], [*messages, said]))
            if "tool_calls" in said and draw(st.booleans()):
                about = {semconv.OPERATION: semconv.OP_EXECUTE_TOOL, semconv.TOOL_NAME: "look_up"}
                about[semconv.TOOL_CALL_ID] = f"call-{own}"
                self.tools.append((self.other("execute_tool look_up", parent, **about), own))

    def record(
        self, own: str, parent: str, kind: str, prompt: list[int], ids: list[int], request: Any, said: Any
    ) -> None:
        tokens: dict[str, Any] = {"ids_missing": "the server gives none"}
        if kind != "text":
            logprobs = self.draw(st.lists(LOGPROB, min_size=len(ids), max_size=len(ids)))
            tokens = {"prompt_ids": pack_ids(prompt), "response_ids": pack_ids(ids), "logprobs": pack_floats(logprobs)}
        response = {"choices": [{"index": 0, "message": said}]}
        tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
        call = ModelCall(
            request_id=f"request-{own}",
            dialect="chat",
            model="small",
            policy=self.draw(st.sampled_from(["", "main"])),
            model_version=self.draw(st.sampled_from(["", "v2"])),
            request={"model": "small", **request, "tools": tools},
            response=None if kind == "failed" else response,
            finish_reason="stop",
            error="refused" if kind == "failed" else "",
            status_code=500 if kind == "failed" else 200,
            is_complete=kind not in ("failed", "cut"),
            **({} if kind == "failed" else tokens),
        )
        self.add(call_span(own, call, parent=parent, at_ns=self.tick()))
        if kind in ("", "text"):
            self.calls.append(own)

    def reward(self) -> None:
        draw = self.draw
        scope = draw(st.sampled_from(["rollout", "rollout", "turn"])) if self.calls else "rollout"
        reward = Reward(
            value=draw(st.one_of(st.none(), st.floats(-2, 2))),
            name=draw(st.sampled_from(["", "goal", "form"])),
            dimensions=draw(st.sampled_from([{}, {"syntax": 1.0, "goal": None}])),
            scope=scope,
            span_id=draw(st.sampled_from(self.calls)) if scope == "turn" else None,
            source=draw(st.sampled_from(["evaluator", "environment", "agent", "human"])),
            feedback=draw(st.sampled_from(["because", "wörd\x00s"])),
        )
        span = make_reward_span("ro-1", "ro-1.1", reward, parent_id=self.agents[""])
        at_ns = self.tick()
        self.add(replaced(span, span_id=self.new_id(), start_ns=at_ns, end_ns=at_ns, is_late=draw(st.booleans())))


@st.composite
def recordings(draw: Any) -> Recording:
    """Draw a finished rollout with its deciding attempt, and sometimes a call of an earlier attempt."""
    world = World(draw)
    world.agents[""] = world.other(semconv.ROOT_SPAN_NAME, "")
    for step in draw(st.lists(st.sampled_from(["call", "call", "call", "reward"]), min_size=1, max_size=9)):
        getattr(world, step)()
    if draw(st.booleans()):
        earlier = ModelCall(request_id="other", dialect="chat", model="small", prompt_ids=pack_ids([1]))
        world.add(call_span("f" * 16, earlier, parent="", at_ns=world.tick(), attempt="ro-1.0"))
    return recording_of(world.spans)


def recording_of(spans: list[Span], rollout_id: str = "ro-1") -> Recording:
    """Return a rollout with these spans that succeeded in its only attempt."""
    attempt_id = f"{rollout_id}.1"
    rollout = Rollout(
        rollout_id=rollout_id,
        task={"prompt": "2 + 2?", "answer": "4"},
        experiment="sums",
        group_id="task-1",
        status="succeeded",
        attempts=1,
        attempt_id=attempt_id,
        created_at=1_700_000_000.0,
        started_at=1_700_000_000.0,
        finished_at=1_700_000_100.0,
    )
    attempt = Attempt(attempt_id=attempt_id, rollout_id=rollout_id, number=1, worker="w", status="succeeded")
    return Recording(rollout=rollout, attempts=[attempt], spans=spans)
