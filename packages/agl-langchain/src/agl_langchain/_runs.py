"""The open runs of LangChain, with the kind and the place of each in the tree of spans.

Runs of kind ``pass`` are LangChain's own plumbing, such as prompts, parsers and unnamed sequences. They have no span;
their children belong to the nearest enclosing run that has one.
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
    """One run of LangChain.

    Attributes:
        attempt: The attempt in which the run started.
        kind: The run's kind; that of a chain may change when its first node starts.
        name: The framework's name for the run.
        is_named: Whether a person chose the name.
        is_graph_node: Whether the run is a node of a LangGraph graph.
        parent: The enclosing run, if it belongs to the same attempt.
        outer_span_id: The enclosing span if it is not LangChain's: an operation's, another framework's, or the
            attempt's root.
        caller: The run whose code called the model.
        span: The run's span; ``None`` while ``kind`` is ``pass``.
        start_ns: The start of the run, in Unix nanoseconds.
        handed_off: Whether a hand-off that passes through this run is already recorded.
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
        """Return this run, or the nearest enclosing one that has a span; ``None`` if none has."""
        run: Run | None = self
        while run is not None and run.span is None:
            run = run.parent
        return run

    def parent_id(self) -> str:
        """Return the id of the span that encloses this run's span."""
        run: Run = self
        while run.outer_span_id is None and run.parent is not None:
            run = run.parent
            if run.span is not None:
                return run.span.span_id
        return run.outer_span_id or run.attempt.root_span_id

    def owner(self) -> str:
        """Return the name of the agent of this run, or else that of the nearest node; ``""`` if neither is known."""
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
        """Return true if a graph node or an agent encloses this run, with no tool between them."""
        run = self.parent
        while run is not None and run.kind != "tool":
            if run.is_graph_node or run.kind == "agent":
                return True
            run = run.parent
        return False

    def hand_off(self, target: str) -> None:
        """Record a hand-off on this run, and mark the enclosing runs, so that none of them records it again."""
        if not target or self.handed_off or self.span is None:
            return
        self.span.set(source=self.owner(), target=target)
        run: Run | None = self
        while run is not None:
            run.handed_off = True
            run = run.parent
