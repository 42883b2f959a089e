"""Make the example's vision-language model from nothing: `python make_model.py --out out --seed 0`."""

import argparse
from pathlib import Path

from agent import QUESTION

from agl_vision.tiny import make_tiny

WORDS = (QUESTION, "user\n", "assistant\n")


def main() -> None:
    """Write the model as an ordinary Hugging Face directory with tokenizer and processor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = make_tiny(options.out / "model", words=WORDS, picture=8, context=256, seed=options.seed)
    print(f"made a vision-language model in {folder}")


if __name__ == "__main__":
    main()
