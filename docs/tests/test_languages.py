"""The programs of the page on other languages run, each where its toolchain is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "how-to" / "other-languages.md"
PROGRAMS = {"curl": ("sh", "curl"), "Node": ("node", "npm"), "Java": ("java",)}
REGISTRY = ["npm", "view", "openai", "version", "--fetch-retries=0", "--fetch-timeout=20000"]


@pytest.mark.long
@pytest.mark.parametrize("language", PROGRAMS)
def test_program_gets_a_reward(language: str, run_page):
    for program in PROGRAMS[language]:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}, which is not installed here")
    if language == "Node" and subprocess.run(REGISTRY, capture_output=True, timeout=120).returncode:
        pytest.skip("npm's registry cannot be reached")
    if language == "Java" and subprocess.run(["java", "--source", "15", "--version"], capture_output=True).returncode:
        pytest.skip("needs Java 15 or later")
    run_page(PAGE, sections=("The experiment", language))


def test_page_has_no_other_programs():
    sections = {line.removeprefix("## ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "## "}
    assert PROGRAMS.keys() == sections - {"What the program gets", "The experiment", "Train it"}
