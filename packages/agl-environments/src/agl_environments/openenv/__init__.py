"""Runs agents that play one episode of an OpenEnv server's environment in each rollout.

The runner ``openenv`` passes a :class:`Session` as the agent's parameter ``env``, or a :class:`BlockingSession` if the
agent is a plain function.
"""

from agl_environments.openenv.session import BlockingSession, OpenEnvError, ServerLostError, Session, Step

__all__ = ["BlockingSession", "OpenEnvError", "ServerLostError", "Session", "Step"]
