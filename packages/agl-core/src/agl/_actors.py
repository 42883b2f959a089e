"""Finds the agents, nodes and tools around a model call, from the spans that tracers recorded."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from agl import semconv
from agl.schemas import Span

# A recursive agent may nest spans without end, and every transition carries its path.
MAX_PATH = 64
"""The most names in :attr:`Who.path`; a longer path keeps its innermost names."""


class Who(NamedTuple):
    """The actors that enclose a span.

    Attributes:
        agent: The name of the nearest agent; without an agent, that of the nearest node, role or operation, in this
            order of preference; ``""`` if none is known. A workflow (a graph, team or crew) counts as a node.
        path: Names of workflows, agents, nodes, roles, tools and operations, outermost first.
        inside: The part of ``path`` from the nearest agent inwards; the whole path if there is no agent.
        named: The nearest name of each kind: agent, node, role, operation.
    """

    agent: str = ""
    path: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    named: tuple[str, str, str, str] = ("", "", "", "")

    @property
    def names(self) -> tuple[str, ...]:
        """The names to match with a policy's ``agents`` pattern: from the innermost actor outwards, the agent last."""
        # The agent comes last although it is the outermost: a policy that is declared for a node or
        # role within an agent is more specific than one for the agent.
        return tuple(dict.fromkeys(name for name in (*reversed(self.inside), self.agent) if name))


_ROOT = Who()
# The names by which agents are selected come from attributes of the GenAI conventions and from
# agl.node and agl.role, which the conventions lack
# (https://opentelemetry.io/docs/specs/semconv/gen-ai/).
_NAMES = frozenset({semconv.AGENT_NAME, semconv.NODE, semconv.ROLE, semconv.TOOL_NAME, semconv.WORKFLOW_NAME})
NAMING = _NAMES | {semconv.OPERATION}
"""The span attributes that name an actor."""


class Enclosing:
    """Finds the actors that enclose spans; visits every span only once, and uses no recursion."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans: Mapping[str, Span] = {span.span_id: span for span in spans}
        # Filled from the outside in, so that siblings share the work: n spans cost n steps, however
        # deep they are.
        self._known: dict[str, Who] = {}

    def who(self, span: Span) -> Who:
        """The actors that enclose ``span``, including those that the span itself names."""
        return step_into(self._around(span), span.attributes, _operation(span))

    def _around(self, span: Span) -> Who:
        above = self._parent(span)
        known = _ROOT if above is None else self._known.get(above.span_id)
        return self._climb(span) if known is None else known

    def _climb(self, span: Span) -> Who:
        """Return the actors around ``span``; stops at the root, at a known span, or at a cycle in foreign data."""
        unvisited: list[Span] = []
        # Spans of foreign programs arrive over OTLP as they are; one that is its own ancestor must
        # not hang the reader.
        seen = {span.span_id}
        above = self._parent(span)
        while above is not None and above.span_id not in self._known and above.span_id not in seen:
            unvisited.append(above)
            seen.add(above.span_id)
            above = self._parent(above)
        who = _ROOT if above is None else self._known.get(above.span_id, _ROOT)
        # Outermost first, because the names of a span depend on those of the spans around it.
        for enclosing in reversed(unvisited):
            who = step_into(who, enclosing.attributes, _operation(enclosing))
            self._known[enclosing.span_id] = who
        return who

    def _parent(self, span: Span) -> Span | None:
        """The span around ``span``: the recorded framework span that the call names, or else the parent."""
        framework = span.attributes.get(semconv.FRAMEWORK_SPAN_ID)
        # The wire hook sends the framework's current span along, because the call leaves in the
        # HTTP client's own context, where the parent may be another library's span.
        found = self._spans.get(framework) if isinstance(framework, str) else None
        if found is None and span.parent_id is not None:
            found = self._spans.get(span.parent_id)
        return found


def step_into(around: Who, attributes: Mapping[str, object], operation: str) -> Who:
    """The actors inside a span: the actors around the span, and those that the span names itself.

    Args:
        around: The actors around the span.
        attributes: The span's attributes.
        operation: The span's name, if no semantic convention describes the span; otherwise ``""``.
    """
    # Most spans name nobody (model calls, rewards, messages); this path has to be short.
    if not operation and _NAMES.isdisjoint(attributes):
        return around
    agent, node, role, tool = (
        _name(attributes, key) for key in (semconv.AGENT_NAME, semconv.NODE, semconv.ROLE, semconv.TOOL_NAME)
    )
    if not (agent or node or role or tool):  # else the name is that of the workflow around the span
        node = _name(attributes, semconv.WORKFLOW_NAME)
    inner = node or role or tool or operation
    # Frameworks open several spans for one agent, such as a run and its steps; naming it again is
    # not entering another one.
    if not (agent or inner) or (agent == around.named[0] and not inner):
        return around
    added = tuple(dict.fromkeys(name for name in (agent, inner) if name))
    # Entering an agent starts a new scope: selecting the outer agent must not select its sub-
    # agents' calls.
    inside = added if agent else (*around.inside, *added)
    # Of each kind the nearest name stays in force until a span of that kind replaces it.
    named = tuple(new or old for new, old in zip((agent, node, role, operation), around.named, strict=True))
    return Who(
        next((name for name in named if name), ""),
        (*around.path, *added)[-MAX_PATH:],
        inside[-MAX_PATH:],
        cast("tuple[str, str, str, str]", named),
    )


def _name(attributes: Mapping[str, object], key: str) -> str:
    value = attributes.get(key)
    return value if isinstance(value, str) else ""


def _operation(span: Span) -> str:
    """The span's name if ``agl.operation`` opened the span; ``""`` for a span of a semantic convention."""
    # agl.operation records a plain internal span. Spans of the conventions have an operation
    # attribute; calls and rewards have a payload.
    is_plain = (
        span.kind == "internal"
        and span.call is None
        and span.reward is None
        and semconv.OPERATION not in span.attributes
        and span.name != semconv.ROOT_SPAN_NAME
    )
    return span.name if is_plain else ""
