"""Environments behind OpenEnv servers, for agents that play an episode of one in each rollout.

The runner ``openenv`` gives the agent's parameter ``env`` a :class:`Session`, or a :class:`BlockingSession` where the
agent is a plain function.
"""

from agl_environments.openenv.session import BlockingSession, OpenEnvError, ServerLostError, Session, Step

__all__ = ["BlockingSession", "OpenEnvError", "ServerLostError", "Session", "Step"]
