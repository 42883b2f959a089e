"""agl_environments.verifiers: environments of the verifiers library as agent, tasks and reward.

There is nothing to import here: ``agent = "verifiers:NAME"`` in an experiment file names an environment.
"""

__all__: list[str] = []
