"""Two settings of one experiment file, whose ``workdir`` is written in it, are compared without losing the first."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_run_under_another_name_leaves_the_files_of_the_first_as_they_are(
    agl: Callable[..., Any], experiment: Callable[..., Path]
) -> None:
    file = experiment(steps=2)
    file.write_text(file.read_text().replace("[experiment]\n", '[experiment]\nworkdir = "out"\n', 1))

    def run(*words: str) -> dict[str, Any]:
        process = agl("run", str(file), "--quiet", "--json", *words, cwd=file.parent)
        output, errors = process.communicate(timeout=90)
        assert 0 == process.returncode, errors
        return json.loads(output)

    first = run()
    metrics = Path(first["workdir"], "metrics.jsonl")
    written = metrics.read_bytes()
    second = run("--set", "experiment.name=other")

    assert file.parent / "out/toy" == Path(first["workdir"])
    assert file.parent / "out/other" == Path(second["workdir"])
    assert written == metrics.read_bytes()
    assert first["workdir"] == run("--fresh")["workdir"]
