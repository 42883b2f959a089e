"""agl_environments.verifiers: uses an environment of the library verifiers as agent, tasks and reward.

There is nothing to import here: ``agent = "verifiers:NAME"`` in an experiment file names an environment.
"""

__all__: list[str] = []
