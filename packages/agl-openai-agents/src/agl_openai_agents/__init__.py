"""Agents of the OpenAI Agents SDK in agl rollouts; see :class:`agl_openai_agents.tracer.OpenAIAgentsTracer`."""
