"""Which distribution holds a well-known component that is not installed, for the ``pip install`` line."""

from agl._entries import Kind

_BY_PACKAGE: dict[str, tuple[tuple[Kind, tuple[str, ...]], ...]] = {
    "agl-run": (
        ("store", ("sqlite",)),
        ("runner", ("async", "process", "command")),
        ("policy", ("openai",)),
        ("logger", ("jsonl",)),
    ),
    "agl-credit": (("credit", ("turn", "role", "hierarchical", "leave-one-out", "shapley")),),
    "agl-langchain": (("tracer", ("langchain", "langgraph")),),
    "agl-autogen": (("tracer", ("autogen",)),),
    "agl-openai-agents": (("tracer", ("openai-agents",)),),
    "agl-crewai": (("tracer", ("crewai",)),),
    "agl-algo-torch": (("algorithm", ("sft", "grpo", "ppo", "dpo")), ("policy", ("torch",))),
    "agl-algo-verl": (("algorithm", ("verl",)), ("policy", ("verl",))),
    "agl-algo-apo": (("algorithm", ("apo", "gepa", "random")),),
    "agl-store-postgres": (("store", ("postgresql", "postgres")),),
    "agl-store-redis": (("store", ("redis", "rediss")),),
    "agl-ray": (("runner", ("ray",)),),
    "agl-gateway": (("gateway", ("gateway",)), ("command", ("serve", "resources split")), ("store", ("http", "https"))),
    "agl-console": (("command", ("console",)),),
}

KNOWN: dict[tuple[Kind, str], str] = {
    (kind, name): package for package, contents in _BY_PACKAGE.items() for kind, names in contents for name in names
}
"""Distribution by kind and name of a component."""
