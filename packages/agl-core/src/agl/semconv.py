"""Names of span attributes: the GenAI semantic conventions (development snapshot of late 2026), and agl's own.

The conventions moved to a repository of their own and still change, so the constants are kept here. Attributes that
they lack are named ``agl.*``. Rollout and attempt ids are fields of the span, not attributes.
"""

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
AGENT_NAME = "gen_ai.agent.name"
AGENT_ID = "gen_ai.agent.id"
WORKFLOW_NAME = "gen_ai.workflow.name"
CONVERSATION_ID = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_CREATION_TOKENS = "gen_ai.usage.cache_creation.input_tokens"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOOL_NAME = "gen_ai.tool.name"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"
EVALUATION_NAME = "gen_ai.evaluation.name"
EVALUATION_SCORE = "gen_ai.evaluation.score.value"
EVALUATION_EXPLANATION = "gen_ai.evaluation.explanation"
ERROR_TYPE = "error.type"
USER_AGENT = "user_agent.original"
SERVER_ADDRESS = "server.address"

# The conventions know agents, tools and workflows; graphs have nodes, and teams have roles and
# hand-offs.
NODE = "agl.node"
ROLE = "agl.role"
HANDOFF_SOURCE = "agl.handoff.source"
HANDOFF_TARGET = "agl.handoff.target"
FRAMEWORK_SPAN_ID = "agl.framework_span_id"
CALLER = "agl.caller"
CLIENT = "agl.client"
OBSERVATION_ROLE = "agl.observation.role"
OBSERVATION_CONTENT = "agl.observation.content"
MESSAGE = "agl.message"
OBJECT = "agl.object"
# The conventions have no version of the weights, without which a rollout cannot be called stale.
MODEL_VERSION = "agl.model_version"
SPLIT_ARM = "agl.split.arm"
SAMPLING_OVERRIDDEN = "agl.sampling.overridden"
SAMPLING_KEPT = "agl.sampling.kept"
UNRECORDED = "agl.unrecorded"
"""On the span of a model call that a tracer noticed at its client and nobody recorded.

The value is ``policy`` for a call to a policy's server, ``foreign`` for a call to any other server.
"""

UNREADABLE = "agl.unreadable"
"""The name of a span, and the error type of an attempt, that stand for a damaged one that a store cannot read."""

NOT_STORED = "agl.not_stored"
"""On a span that is only partly stored: the reason why parts are missing."""

HELPER = "helper-call"
"""The role of a coding agent's side call, such as for a title or a summary.

Such calls train only where they are selected by this name.
"""

OP_CHAT = "chat"
OP_TEXT_COMPLETION = "text_completion"
OP_EMBEDDINGS = "embeddings"
OP_INVOKE_AGENT = "invoke_agent"
OP_INVOKE_WORKFLOW = "invoke_workflow"
# Ours, like handoff below, and formed like the verbs of the conventions.
OP_INVOKE_NODE = "invoke_node"
OP_EXECUTE_TOOL = "execute_tool"
OP_HANDOFF = "handoff"
OP_EVALUATE = "evaluate"

OUTPUT = "agl.output"
"""On the root span: the agent's return value, unless it is a reward."""

WORKSPACE = "agl.workspace"
"""On the root span of a coding harness's attempt: the address of its sandbox, by which rewards find it."""

SANDBOX = "agl.sandbox"
"""On the root span of a coding harness's attempt: the name of its sandbox's backend."""

HARNESS = "agl.harness"
"""On the root span of a coding harness's attempt: the harness's name and version."""

TASK_FOLDER = "agl.task_folder"
"""On the root span of a coding harness's attempt: the folder of its task, if the task has one."""

RUNNER_ATTRIBUTES = (OUTPUT, WORKSPACE, SANDBOX, HARNESS, TASK_FOLDER)
"""Attributes that only runners may record.

Rewards rely on them, so a gateway removes them from spans that come with an attempt's own token.
"""

ROOT_SPAN_NAME = "rollout"
"""Name of the span around the whole attempt; it is the parent of all spans without another parent."""
