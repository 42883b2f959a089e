"""The scripted half of the example, so that it runs without a key: the checker's model and the optimiser's model.

The checker's model follows its prompt to the letter and knows nothing by itself: it copies the draft, and writes those
entries in another style for which the prompt holds a line such as `Write the date as ISO 8601.` The optimiser is that
of the checkout's `worlds`: it reads complaints in the runs that it is shown and writes the line that answers one, and
misreads every fourth of them.
"""

import sys
from pathlib import Path

import house

sys.path.append(str(Path(__file__).parents[2]))  # the checkout, which holds worlds/

from agl_testing.model_server import ModelRequest, Reply, ScriptedModelServer, Step
from worlds.prompts import obeyed_styles
from worlds.prompts_optimizer import ScriptedOptimizer

CHECKER_MODEL, OPTIMIZER_MODEL = "checker", "editor"


def check(prompt: str) -> str:
    """The checker's answer to a prompt that holds a draft."""
    styles = obeyed_styles(prompt)
    draft = house.read_form(prompt)
    return house.write_form(
        {field: house.styled(text, styles.get(field, house.PLAIN)) for field, text in draft.items()}
    )


def server(*, seed: int = 0) -> ScriptedModelServer:
    """Return a server of both models; use it as a context manager."""
    optimizer = ScriptedOptimizer(seed=seed)

    def respond(request: ModelRequest) -> Step:
        if request.body.get("model") == CHECKER_MODEL:
            return Reply(text=check(request.last_text))
        return optimizer.respond(request)

    return ScriptedModelServer(respond=respond, models=(CHECKER_MODEL, OPTIMIZER_MODEL))
