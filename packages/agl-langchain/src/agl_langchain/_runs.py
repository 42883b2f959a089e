"""The runs that LangChain has started and not ended: where each belongs, and what its span will say.

A run becomes a span when it ends. Runs of kind ``pass`` (LangChain's own plumbing, such as prompts, parsers and
unnamed sequences) become none: what happens in them belongs to the nearest run around them that does.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

from agl.schemas import new_span_id
from agl.tracing import Capture

Kind = Literal["pass", "workflow", "agent", "node", "tool", "model", "retrieval"]


@dataclass(eq=False, slots=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        capture: The attempt that it started in.
        parent: The run that it was started in, if that belongs to the same attempt.
        above: The span that it started in where that is none of LangChain's: an operation, another framework's, or
            the attempt's root.
        name: What the framework calls it.
        is_named: Whether a person chose the name.
        is_graph_node: Whether it is a node of a LangGraph graph.
        handed_off: Whether a hand-off that passes through it is recorded already.
        within: The run whose code was running when a model was called.
    """

    capture: Capture
    kind: Kind
    name: str
    is_named: bool = False
    is_graph_node: bool = False
    parent: "Run | None" = None
    above: str | None = None
    within: UUID | None = None
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    span_id: str = field(default_factory=new_span_id)
    start_ns: int = field(default_factory=time.time_ns)
    handed_off: bool = False
    is_open: bool = True

    def recorded(self) -> "Run | None":
        """This run, or the nearest one around it that becomes a span."""
        run: Run | None = self
        while run is not None and run.kind == "pass":
            run = run.parent
        return run

    def parent_id(self) -> str:
        """Id of the span around this run's."""
        run: Run = self
        while run.above is None and run.parent is not None:
            run = run.parent
            if run.kind != "pass":
                return run.span_id
        return run.above or run.capture.root_span_id

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
        """Whether a graph's node or an agent encloses this run, up to the nearest tool."""
        run = self.parent
        while run is not None and run.kind != "tool":
            if run.is_graph_node or run.kind == "agent":
                return True
            run = run.parent
        return False
