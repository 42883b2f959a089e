"""Facts about each harness that the matrix needs beside agl-harness' table."""

import json

from tools.harness_matrix.cells import Knobs

_NO_SUBAGENTS = "it has no sub-agents"
_PI_SETTINGS = json.dumps({"compaction": {"enabled": True, "reserveTokens": 1000, "keepRecentTokens": 100}})

KNOBS = {
    "pi": Knobs(
        resume=("--continue",),
        compact_files={".pi/agent/settings.json": _PI_SETTINGS},
        compact_context=12_000,
        lacks={"sub-agent": _NO_SUBAGENTS},
    ),
    "claude-code": Knobs(resume=("--continue",), compact="/compact"),
    "codex": Knobs(
        resume=("resume", "--last"),
        compact_arguments=("-c", "model_auto_compact_token_limit=5000"),
    ),
    "opencode": Knobs(resume=("--continue",), compact_context=40_000, kind="general"),
    "qwen-code": Knobs(resume=("--continue",), compact="/compress"),
    "gemini-cli": Knobs(resume=("--resume", "latest"), compact="/compress", kind="generalist"),
    "copilot-cli": Knobs(resume=("--continue",), compact_context=60_000, kind="general-purpose"),
    "mini-swe-agent": Knobs(
        lacks={
            "sub-agent": _NO_SUBAGENTS,
            "compaction": "it never makes a conversation shorter",
            "resume": "it cannot go on with a session",
        }
    ),
    "aider": Knobs(
        resume=("--restore-chat-history",),
        compact_arguments=("--max-chat-history-tokens", "10", "--restore-chat-history"),
        lacks={
            "tool": "it has no tools: it edits files that the answer holds",
            "parallel tools": "it has no tools: it edits files that the answer holds",
            "sub-agent": _NO_SUBAGENTS,
        },
    ),
}
"""By the name of the harness."""
