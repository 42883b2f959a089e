"""Running agents: what an agent is, the runners that execute attempts, and the worker that feeds them."""
