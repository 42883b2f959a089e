"""Harbor's tasks: their folders, what their Dockerfiles give a sandbox, and the reward of their tests."""
