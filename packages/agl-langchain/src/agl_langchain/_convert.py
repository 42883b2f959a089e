"""Converts LangChain's and LangGraph's objects to span attributes; no other module of this package reads them.

Names that a person chose (of agents, graph nodes, graphs and chains) become ``gen_ai.agent.name``, ``agl.node``
and ``gen_ai.workflow.name``. Names that the libraries generate do not, so that no pattern matches them by accident.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agl_langchain._runs import Run

_MADE_UP = ("Runnable", "Channel", "_", "LangGraph", "Unnamed", "lambda", "<")
_AGENT_NODES = frozenset({"model", "agent"})
"""Nodes in which the agents of ``create_agent`` and ``create_react_agent`` call their model."""

_PREBUILT_NODES = _AGENT_NODES | {"tools"}
"""Node names of such agents; they are ignored if a person named an enclosing run."""

_URLS = ("base_url", "openai_api_base", "anthropic_api_url", "azure_endpoint", "endpoint_url", "endpoint")
"""The attributes in which LangChain's chat models hold the URL that they call."""

INTERRUPT = "agl.interrupt"
"""Name of the span attribute with the reason why a graph stopped and can be resumed, such as ``GraphInterrupt``."""

_END = "__end__"


def classify(run: Run, *, metadata: Mapping[str, Any], tags: Sequence[str], run_type: str | None) -> None:
    """Set ``run.kind`` for the run of a chain; ``run.parent`` must be set before."""
    run.is_named = run_type is None and not run.name.startswith(_MADE_UP)
    is_task = _is_task(run, metadata)
    run.is_graph_node = is_task or any(tag.startswith("graph:step:") for tag in tags)
    if metadata.get("lc_agent_name") == run.name and run.is_named:
        run.kind = "agent"
    elif run.is_graph_node:
        run.kind = "node"
        if not is_task:
            _enter_graph(run)
    elif run.parent is None:
        run.kind = "workflow"
    elif run.is_named and not run.is_within_node():
        run.kind = "node"


def _is_task(run: Run, metadata: Mapping[str, Any]) -> bool:
    """Return true for a ``@task`` of LangGraph's functional API, whose path contains the path of the calling node."""
    path = metadata.get("langgraph_path")
    is_called = isinstance(path, tuple) and any(isinstance(part, tuple) for part in cast("tuple[Any, ...]", path))
    return is_called and run.is_named and metadata.get("langgraph_node") == run.name


def _enter_graph(node: Run) -> None:
    """Set the kind of a graph at its first node, because older releases do not mark agents as such."""
    graph = node.parent
    if graph is None:
        return
    known = graph.kind
    if node.name in _AGENT_NODES and graph.is_named:
        graph.kind = "agent"
    elif graph.kind == "pass":
        graph.kind = "workflow"
    if graph.kind != known:
        graph.describe()
    if node.name in _PREBUILT_NODES and not graph.is_named and graph.owner():
        node.is_named = False


def about_model(
    serialized: Mapping[str, Any], metadata: Mapping[str, Any], parameters: Mapping[str, Any]
) -> dict[str, str]:
    """Return the called model, its provider, the client's class and the server, as far as the settings name them."""
    path, settings = serialized.get("id"), serialized.get("kwargs")
    names: list[Any] = cast("list[Any]", path) if isinstance(path, list) else []
    given: Mapping[str, Any] = cast("Mapping[str, Any]", settings) if isinstance(settings, dict) else {}
    model = metadata.get("ls_model_name") or parameters.get("model") or parameters.get("model_name")
    return {
        "model": str(model or ""),
        "provider": str(metadata.get("ls_provider") or ""),
        "client": ".".join(map(str, names)),
        "server": next((str(given[key]) for key in _URLS if given.get(key)), ""),
    }


def about_output(run: Run, output: Any) -> dict[str, Any]:
    """Record a hand-off in a run's output; return a tool's output as arguments of ``close``; empty for other runs."""
    target = _target(output)
    run.hand_off(target)
    if run.kind != "tool" or target:
        return {}
    content = getattr(output, "content", output)
    is_error = getattr(output, "status", None) == "error"
    return {"result": content, **({"error": str(content), "error_type": "ToolError"} if is_error else {})}


def about_error(run: Run, error: BaseException) -> dict[str, Any]:
    """Return a run's exception as arguments of ``close``; empty for hand-offs and interrupts, which are not errors."""
    errors = sys.modules.get("langgraph.errors")
    if errors is None or not isinstance(error, errors.GraphBubbleUp):
        return {"error": error}
    target = _target(error.args[0]) if error.args else ""
    run.hand_off(target)
    if not target and run.span is not None:
        run.span.set({INTERRUPT: type(error).__qualname__})
    return {}


def _target(output: Any) -> str:
    """Return the node to which a command sends the graph; ``""`` if ``output`` is no command or ends the graph."""
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
