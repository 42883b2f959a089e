"""Tune the prompt of an agent that books rooms: `python demo.py [--seed N] [--file messages.toml]`.

With OPENAI_API_KEY set it asks the models that `experiment.toml` names, at the endpoint in OPENAI_BASE_URL if that is
set. Without a key it asks a scripted world that ships with the example.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
WORK = HERE / "out"


@contextmanager
def models() -> Iterator[list[str]]:
    """Give the settings for `agl run` that say where the models are."""
    if "OPENAI_API_KEY" in os.environ:
        url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
        yield [f'policy.llm.base_url="{url}"', f'algorithm.tuner.params.optimizer.base_url="{url}"']
        return
    import scripted

    print("OPENAI_API_KEY is not set: asking the scripted world of scripted.py\n")
    with scripted.server() as server:
        url = f'base_url="{server.base_url}"'
        yield [
            f'policy.llm={{use="openai", {url}, model="{scripted.BOOKING_MODEL}", api_key_env=""}}',
            f'algorithm.tuner.params.optimizer={{{url}, model="{scripted.OPTIMIZER_MODEL}"}}',
        ]


def run(*words: str) -> None:
    """Run a program in this folder; ends the demo with its exit status when it fails."""
    status = subprocess.run([sys.executable, *words], cwd=HERE, check=False).returncode
    if status:
        sys.exit(status)


def main() -> None:
    """Make the data, tune the prompt, say what to look at."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", default="experiment.toml")
    arguments = parser.parse_args()
    seed = arguments.seed
    shutil.rmtree(WORK, ignore_errors=True)
    run("make_data.py", "--seed", str(seed))
    with models() as settings:
        options = [word for setting in (f"experiment.seed={seed}", *settings) for word in ("--set", setting)]
        run("-m", "agl", "run", arguments.file, *options)
    best = next(WORK.glob("*/run-1/tuner/best/booking_prompt.txt"))
    print(f"\nThe prompt that won, from {best.relative_to(HERE)}:\n\n{best.read_text(encoding='utf-8')}")
    print("\nlook at the newest run:  agl show latest --store sqlite:///out/runs.db")


if __name__ == "__main__":
    main()
