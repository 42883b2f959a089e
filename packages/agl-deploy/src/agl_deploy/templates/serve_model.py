"""Serves the weights in a folder with vLLM: python serve_model.py FOLDER NAME [ARGUMENT OF VLLM]...

An adapter is served as NAME on top of its base model, which is served as NAME-base. Full weights are served as NAME.
The options make vLLM return log-probabilities that are suitable for training.
"""

import json
import os
import sys
from pathlib import Path

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's --max-lora-rank accepts."""

folder, name, *rest = sys.argv[1:]
options = ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", *rest]
adapter = Path(folder, "adapter_config.json")
if adapter.exists():
    config = json.loads(adapter.read_text(encoding="utf-8"))
    rank = next(rank for rank in RANKS if rank >= config["r"])
    own = ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"{name}={folder}"]
    command = ["vllm", "serve", config["base_model_name_or_path"], "--served-model-name", f"{name}-base", *own]
else:
    command = ["vllm", "serve", folder, "--served-model-name", name]
os.execvp(command[0], [*command, *options])
