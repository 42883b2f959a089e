"""The scripted model of the matrix: it uses whatever tools a harness offers, by their schemas."""

from typing import Any, cast

from agl_testing.model_server import ModelRequest, Reply, Step, ToolCall

ANSWER = "All done: 42."
CALLING = "I will use a tool."
SUBTASK = "SUBTASK-7: answer with the word seven."
SUB_ANSWER = "seven"
SUMMARY = "Summary of the work so far: the file was asked for and made."

SHELLS = (
    *("bash", "shell", "exec_command", "run_shell_command", "run_commands", "execute_command", "run_terminal_command"),
    *("runterminalcommand", "run_command"),
)
SPAWNERS = ("agent", "task", "spawn_agent", "invoke_agent", "subagent", "spawn_subagent", "dispatch_agent")
WAITERS = ("wait_agent", "wait")

_COMMANDS = ("command", "cmd", "script")
_PROMPTS = ("prompt", "message", "task", "objective", "request", "instructions", "query")
_KINDS = ("subagent_type", "agent_type", "agent_name", "agent", "subagent_name")


class Tool:
    """A tool as a request of any API declares it.

    The gateway puts the namespace of a tool in front of its name where a call of responses becomes a chat completion.
    """

    def __init__(self, declared: dict[str, Any], namespace: str = "") -> None:
        function: dict[str, Any] = declared.get("function") or declared
        self.name = str(function.get("name") or "")
        before, _, self.short = self.name.rpartition("__")
        self.namespace = namespace or before
        schema: dict[str, Any] = function.get("parameters") or function.get("input_schema") or {}
        self.properties: dict[str, Any] = schema.get("properties") or {}
        self.required: list[str] = schema.get("required") or []

    def call(self, known: dict[str, Any]) -> ToolCall:
        """Return a call with the known arguments that it has, and something valid for every other required one."""
        given = {name: value for name, value in known.items() if name in self.properties}
        rest = {name: _sample(name, self.properties.get(name) or {}) for name in self.required if name not in given}
        namespace = "" if self.short != self.name else self.namespace
        return ToolCall(self.name, {**given, **rest}, namespace)


def _sample(name: str, schema: dict[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    samples: dict[str, Any] = {"boolean": False, "integer": 30, "number": 30, "array": [], "object": {}}
    return samples.get(str(kind), "count" if "name" in name else "make a file")


def tools_of(body: dict[str, Any]) -> list[Tool]:
    """Return the tools of a request, those of namespaces included."""
    found: list[Tool] = []
    for declared in cast("list[dict[str, Any]]", body.get("tools") or []):
        if declared.get("type") == "namespace":
            inner = cast("list[dict[str, Any]]", declared.get("tools") or [])
            found += [Tool(one, str(declared.get("name"))) for one in inner]
        else:
            found.append(Tool(declared))
    return found


def _one_of(tools: list[Tool], names: tuple[str, ...]) -> Tool | None:
    return next((tool for name in names for tool in tools if tool.short.lower() == name), None)


class Brain:
    """Answers the calls of one cell.

    Args:
        commands: Commands to run in one answer, before the last one.
        delegates: Whether a sub-agent is asked instead.
        faults: Faults of the first calls of the harness's main agent.
        kind: The type of sub-agent to ask for.

    Attributes:
        compactions: Number of calls that asked for a summary.
        subagents: Number of calls by sub-agents.
        delegated: Whether a tool for sub-agents was there.
    """

    def __init__(
        self,
        *,
        commands: tuple[str, ...] = (),
        delegates: bool = False,
        faults: tuple[Step, ...] = (),
        kind: str = "general-purpose",
    ) -> None:
        self._commands = commands
        self._delegates = delegates
        self._faults = list(faults)
        self._kind = kind
        self.compactions = 0
        self.subagents = 0
        self.delegated = False
        self.main = 0
        self.is_asked_again = False

    def __call__(self, request: ModelRequest) -> Step:
        """Return the step for a call."""
        if any(turn.role == "user" and SUBTASK in turn.text for turn in request.turns):
            self.subagents += 1
            return Reply(text=SUB_ANSWER)
        tools = tools_of(request.body)
        if self._is_summary(request, tools):
            self.compactions += 1
            return Reply(text=SUMMARY)
        self.main += 1
        if self._faults:
            return self._faults.pop(0)
        calls = self._calls(request, tools)
        return Reply(text=CALLING, tool_calls=calls) if calls else Reply(text=ANSWER)

    def _is_summary(self, request: ModelRequest, tools: list[Tool]) -> bool:
        last = next((turn.text for turn in reversed(request.turns) if turn.role == "user"), "").lower()
        asked = f"{request.turns[0].text[:2000]}\n{last[-6000:]}".lower() if request.turns else ""
        words = ("summar", "compact", "compress", "handoff", "checkpoint", "state_snapshot")
        is_asked = any(word in last for word in words)
        is_asked |= any(word in asked for word in words) and not _one_of(tools, SHELLS)
        said = any(text in turn.text for turn in request.turns for text in (ANSWER, CALLING))
        return said and is_asked and "title" not in asked[:400] and request.turns[-1].role != "tool"

    def _calls(self, request: ModelRequest, tools: list[Tool]) -> tuple[ToolCall, ...]:
        done = sum(turn.role == "tool" for turn in request.turns)
        if self._delegates:
            return self._delegation(tools, done)
        shell = _one_of(tools, SHELLS)
        if shell is None or done or self.compactions:
            return ()
        return tuple(shell.call(dict.fromkeys(_COMMANDS, command)) for command in self._commands)

    def _delegation(self, tools: list[Tool], done: int) -> tuple[ToolCall, ...]:
        spawner, waiter = _one_of(tools, SPAWNERS), _one_of(tools, WAITERS)
        self.delegated = self.delegated or spawner is not None
        if spawner is not None and not done:
            known = {**dict.fromkeys(_PROMPTS, SUBTASK), **dict.fromkeys(_KINDS, self._kind)}
            known = {name: value for name, value in known.items() if name not in spawner_skips(spawner)}
            return (spawner.call(known),)
        if waiter is not None and done == 1 and waiter.namespace:
            return (waiter.call({"timeout_ms": 30_000}),)
        return ()


def spawner_skips(spawner: Tool) -> frozenset[str]:
    """Return the names of optional arguments that a harness fills better itself."""
    return frozenset(("agent_type",)) if spawner.namespace else frozenset()
