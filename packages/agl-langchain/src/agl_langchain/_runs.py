"""The open runs of LangChain, with their kinds and their places in the tree of spans.

Runs of kind ``pass`` (LangChain's own plumbing, such as prompts, parsers and unnamed sequences) have no span. Their
children belong to the nearest enclosing run that has one.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

from agl import semconv
from agl.tracing import ActiveAttempt, OpenSpan, open_span

Kind = Literal["pass", "workflow", "agent", "node", "tool", "model", "retrieval"]

_OPERATIONS: dict[Kind, str] = {
    "workflow": semconv.OP_INVOKE_WORKFLOW,
    "agent": semconv.OP_INVOKE_AGENT,
    "node": semconv.OP_INVOKE_NODE,
    "tool": semconv.OP_EXECUTE_TOOL,
    "model": semconv.OP_CHAT,
    "retrieval": "retrieval",
}


@dataclass(eq=False, slots=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        attempt: The attempt that it started in.
        kind: Its kind; a chain's may change when its first node starts.
        name: The framework's name for it.
        is_named: Whether a person chose the name.
        is_graph_node: Whether it is a node of a LangGraph graph.
        parent: The enclosing run, if it belongs to the same attempt.
        outer_span_id: The enclosing span where LangChain did not make it: an operation's, another framework's, or
            the attempt's root.
        caller: The run whose code called the model.
        span: Its span, ``None`` while its kind is ``pass``.
        handed_off: Whether a hand-off that passes through it is recorded already.
    """

    attempt: ActiveAttempt
    kind: Kind
    name: str
    is_named: bool = False
    is_graph_node: bool = False
    parent: "Run | None" = None
    outer_span_id: str | None = None
    caller: UUID | None = None
    span: OpenSpan | None = None
    start_ns: int = field(default_factory=time.time_ns)
    handed_off: bool = False

    def describe(self, **about: Any) -> None:
        """Open the run's span if it has none yet, and set its name and attributes."""
        if self.kind == "pass":
            return
        operation, named = _OPERATIONS[self.kind], self.name if self.is_named else None
        if self.span is None:
            parent, start_ns = self.parent_id(), self.start_ns
            self.span = open_span(attempt=self.attempt, parent=parent, start_ns=start_ns, is_current=False)
        self.span.name = f"{operation} {about.get('model') or self.name}".rstrip()
        self.span.set(
            operation=operation,
            workflow=named if self.kind == "workflow" else None,
            agent=self.name if self.kind == "agent" else None,
            node=named if self.kind == "node" else None,
            tool=self.name if self.kind == "tool" else None,
            **about,
        )

    def recorded(self) -> "Run | None":
        """This run, or the nearest enclosing one that has a span."""
        run: Run | None = self
        while run is not None and run.span is None:
            run = run.parent
        return run

    def parent_id(self) -> str:
        """Id of the span that encloses this run's."""
        run: Run = self
        while run.outer_span_id is None and run.parent is not None:
            run = run.parent
            if run.span is not None:
                return run.span.span_id
        return run.outer_span_id or run.attempt.root_span_id

    def owner(self) -> str:
        """Name of the agent that this run belongs to; without one the nearest node's; ``""`` if neither is known."""
        node = ""
        run: Run | None = self
        while run is not None:
            if run.kind == "agent":
                return run.name
            if run.kind in ("node", "workflow") and run.is_named:
                node = node or run.name
            run = run.parent
        return node

    def is_within_node(self) -> bool:
        """True if a graph's node or an agent encloses this run within the nearest tool."""
        run = self.parent
        while run is not None and run.kind != "tool":
            if run.is_graph_node or run.kind == "agent":
                return True
            run = run.parent
        return False

    def hand_off(self, target: str) -> None:
        """Record a hand-off on this run, and mark the enclosing runs so that none records it again."""
        if not target or self.handed_off or self.span is None:
            return
        self.span.set(source=self.owner(), target=target)
        run: Run | None = self
        while run is not None:
            run.handed_off = True
            run = run.parent
