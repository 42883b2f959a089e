"""LangChain's and LangGraph's objects as ours; nothing else in this package looks into them.

Names that a person wrote (of agents, graph nodes, graphs and chains) become ``gen_ai.agent.name`` and ``agl.node``;
names that the libraries made up do not, so that they select nothing by accident.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agl import semconv
from agl.schemas import Span
from agl.tracing import failure, host_of, plain
from agl_langchain._runs import Kind, Run

_MADE_UP = ("Runnable", "Channel", "_", "LangGraph", "Unnamed", "lambda", "<")
_AGENT_NODES = frozenset({"model", "agent"})
"""Nodes in which the agents of ``create_agent`` and ``create_react_agent`` call their model."""

_PREBUILT_NODES = _AGENT_NODES | {"tools"}
"""Names that such an agent gives to its nodes; they say nothing where a person named something around it."""

_URLS = ("base_url", "openai_api_base", "anthropic_api_url", "azure_endpoint", "endpoint_url", "endpoint")
"""Under which names LangChain's chat models keep the address that they call."""

INTERRUPT = "agl.interrupt"
"""Why a graph stopped to be resumed later, such as ``GraphInterrupt``."""

_END = "__end__"
_STILL_OPEN = "still open when the attempt ended"
_OPERATIONS: dict[Kind, str] = {
    "workflow": semconv.OP_INVOKE_WORKFLOW,
    "agent": semconv.OP_INVOKE_AGENT,
    "node": "invoke_node",
    "tool": semconv.OP_EXECUTE_TOOL,
    "model": semconv.OP_CHAT,
    "retrieval": "retrieval",
}
_NAMES: dict[Kind, str] = {
    "workflow": semconv.WORKFLOW_NAME,
    "agent": semconv.AGENT_NAME,
    "node": semconv.NODE,
    "tool": semconv.TOOL_NAME,
}


def classify(run: Run, *, metadata: Mapping[str, Any], tags: Sequence[str], run_type: str | None) -> None:
    """Say what kind of run a chain is, now that its place is known."""
    run.is_named = run_type is None and not run.name.startswith(_MADE_UP)
    run.is_graph_node = any(tag.startswith("graph:step:") for tag in tags)
    if metadata.get("lc_agent_name") == run.name and run.is_named:
        run.kind = "agent"
    elif run.is_graph_node:
        run.kind = "node"
        _enter_graph(run)
    elif run.parent is None:
        run.kind = "workflow"
    elif run.is_named and not run.is_within_node():
        run.kind = "node"


def _enter_graph(node: Run) -> None:
    """Know a graph by its first node: the agents of older releases do not say that they are agents."""
    graph = node.parent
    if graph is None:
        return
    if node.name in _AGENT_NODES and graph.is_named:
        graph.kind = "agent"
    elif graph.kind == "pass":
        graph.kind = "workflow"
    if node.name in _PREBUILT_NODES and not graph.is_named and graph.owner():
        node.is_named = False


def thread_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The conversation that a graph's checkpoints belong to."""
    thread = metadata.get("thread_id")
    return {} if thread is None else {semconv.CONVERSATION_ID: str(thread)}


def tool_attributes(name: str, *, arguments: Any, call_id: Any) -> dict[str, Any]:
    """What a tool is called with."""
    found = {semconv.TOOL_NAME: name, semconv.TOOL_ARGUMENTS: plain(arguments)}
    return found if call_id is None else {**found, semconv.TOOL_CALL_ID: str(call_id)}


def model_attributes(metadata: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Which model is called; the call itself is recorded on the wire."""
    model = metadata.get("ls_model_name") or parameters.get("model") or parameters.get("model_name")
    found = {semconv.REQUEST_MODEL: model, semconv.PROVIDER: metadata.get("ls_provider")}
    return {name: str(value) for name, value in found.items() if value}


def client_attributes(serialized: Mapping[str, Any]) -> dict[str, str]:
    """The class that calls the model, and the host where its settings say one."""
    path = serialized.get("id")
    names: list[str] = [str(part) for part in cast("list[Any]", path)] if isinstance(path, list) else []
    settings = serialized.get("kwargs")
    given: Mapping[str, Any] = cast("Mapping[str, Any]", settings) if isinstance(settings, dict) else {}
    url = next((str(given[key]) for key in _URLS if given.get(key)), "")
    found = {semconv.CLIENT: ".".join(names), semconv.SERVER_ADDRESS: host_of(url)}
    return {name: value for name, value in found.items() if value}


def take_output(run: Run, output: Any) -> dict[str, Any]:
    """Keep what a run returned, where that says more than the model calls do; gives the span's status fields."""
    target = _target(output)
    if target and not run.handed_off:
        hand_off(run, target)
    if run.kind != "tool":
        return {"status": "ok"}
    content = getattr(output, "content", output)
    run.attributes[semconv.TOOL_RESULT] = plain(None if target else content)
    if getattr(output, "status", None) != "error":
        return {"status": "ok"}
    run.attributes[semconv.ERROR_TYPE] = "ToolError"
    return {"status": "error", "status_message": str(plain(content))}


def take_error(run: Run, error: BaseException) -> dict[str, Any]:
    """The status fields of a run that raised; a hand-off, an interrupt and a closed stream are no errors."""
    if isinstance(error, GeneratorExit):
        return {"status": "ok"}
    if _bubbles_up(error):
        target = _target(error.args[0]) if error.args else ""
        if target and not run.handed_off:
            hand_off(run, target)
        if not target:
            run.attributes[INTERRUPT] = type(error).__qualname__
        return {"status": "ok"}
    run.attributes[semconv.ERROR_TYPE] = type(error).__qualname__
    return failure(error)


def hand_off(run: Run, target: str) -> None:
    """Record a hand-off on the run that makes it; it then passes through the runs around it."""
    run.attributes[semconv.HANDOFF_SOURCE] = run.owner()
    run.attributes[semconv.HANDOFF_TARGET] = target
    outer: Run | None = run
    while outer is not None:
        outer.handed_off = True
        outer = outer.parent


def span_of(run: Run, *, is_ended: bool = True, **status: Any) -> Span:
    """The span of a run that ended, or of one that is still open when its attempt ends."""
    operation, name = _OPERATIONS[run.kind], run.attributes.get(semconv.REQUEST_MODEL, run.name)
    attributes = {semconv.OPERATION: operation, **run.attributes}
    if run.kind in _NAMES and (run.is_named or run.kind in ("workflow", "tool")):
        attributes[_NAMES[run.kind]] = run.name
    if run.is_named and run.kind == "workflow":
        attributes[semconv.NODE] = run.name
    if not is_ended:
        status = {"status": "error", "status_message": _STILL_OPEN}
    return Span(
        rollout_id=run.capture.rollout_id,
        attempt_id=run.capture.attempt_id,
        trace_id=run.capture.trace_id,
        span_id=run.span_id,
        parent_id=run.parent_id(),
        name=f"{operation} {name}".rstrip(),
        start_ns=run.start_ns,
        end_ns=time.time_ns(),
        attributes=attributes,
        **status,
    )


def _bubbles_up(error: BaseException) -> bool:
    """Whether LangGraph raised this to steer the graph; without LangGraph nobody did."""
    errors = sys.modules.get("langgraph.errors")
    return errors is not None and isinstance(error, errors.GraphBubbleUp)


def _target(output: Any) -> str:
    """Where a command sends the graph next, ``""`` if it is none or ends the graph."""
    types = sys.modules.get("langgraph.types")
    if types is None:
        return ""
    commands: list[Any] = cast("list[Any]", output) if isinstance(output, list) else [output]
    for command in commands:
        goto: Any = command.goto if isinstance(command, types.Command) else ()
        steps: Sequence[Any] = (goto,) if isinstance(goto, str | types.Send) else goto
        names = [str(getattr(step, "node", step)) for step in steps]
        if names and names != [_END]:
            return ",".join(names)
    return ""
