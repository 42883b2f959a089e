"""Harbor tasks: the files in the sandbox, the hidden tests and the reward they give, and refused tasks."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agl.errors import ConfigError, DatasetError
from agl.schemas import Json
from agl_harness.harbor_tasks.checks import read_tasks
from agl_harness.harbor_tasks.dockerfile import read_dockerfile
from agl_harness.harbor_tasks.folder import instruction_of, load_task
from agl_harness.harbor_tasks.layout import layout_of
from agl_harness.sandboxes.isolation import find_isolation
from agl_testing.model_server import ScriptedModelServer

from .conftest import asks, dev

needs_bubblewrap = pytest.mark.skipif(not find_isolation("auto").program, reason="bubblewrap does not work here")

FILE = """
[experiment]
name = "tasks"
harness = "shell.toml"
val = "harbor:tasks"

[runner]
concurrency = 2
timeout_s = 60
params = PARAMS

[policy.main]
use = "openai"
model = "scripted"
base_url = "BASE_URL"
api_key_env = ""

[[reward]]
use = "harbor"
"""

DOCKERFILE = """
FROM python:3.13-slim
ARG NAME=app
ENV GREETING="hello there" DATA=/data
WORKDIR /$NAME/src
COPY . /app/src/
COPY seed.txt ${DATA}/
"""

CONFIG = """
schema_version = "1.4"
[verifier]
timeout_sec = 60
[agent]
timeout_sec = 60
[environment]
memory_mb = 4096
cpus = 1
env = { COLOUR = "${AGL_NO_SUCH:-green}" }
"""

TEST = """#!/bin/bash
if [ "$(python calc.py)" = 3 ] && [ -f /tests/expected ]; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write texts into files below a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def task(project: Path) -> Path:
    """A folder with one Harbor task."""
    return write(
        project / "tasks" / "add",
        {
            "instruction.md": "<!-- a canary line -->\n\nMake calc.py print 3.\n",
            "task.toml": CONFIG,
            "environment/Dockerfile": DOCKERFILE,
            "environment/calc.py": "print(2)\n",
            "environment/seed.txt": "seed\n",
            "tests/test.sh": TEST,
            "tests/expected": "",
            "solution/solve.sh": "#!/bin/bash\necho 'print(3)' > calc.py\n",
        },
    )


def only(result: Any) -> Any:
    """Return the only episode of a dry run."""
    (episode,) = result.episodes
    return episode


def seen(model: ScriptedModelServer) -> str:
    """Return the output of the harness's last command."""
    return model.calls[-1].json["messages"][-1]["content"]


@needs_bubblewrap
def test_harness_works_on_a_harbor_task_and_its_hidden_tests_decide(
    task: Path, project: Path, model: ScriptedModelServer
) -> None:
    model.enqueue(*asks("pwd; ls; cat /data/seed.txt; echo $GREETING $COLOUR; echo 'print(3)' > calc.py"))
    episode = only(dev(project, model, file=FILE))

    assert ("succeeded", 1.0) == (episode.rollout.status, episode.reward), episode.attempt.error
    assert "/app/src\nDockerfile\ncalc.py\nseed.txt\nseed\nhello there green\n" == seen(model)
    assert "Make calc.py print 3.\n" == model.calls[0].json["messages"][0]["content"]
    assert "print(2)\n" == (task / "environment" / "calc.py").read_text()


@needs_bubblewrap
def test_task_that_is_left_undone_gets_the_tests_own_zero(
    task: Path, project: Path, model: ScriptedModelServer
) -> None:
    assert 0.0 == only(dev(project, model, file=FILE)).reward


@needs_bubblewrap
def test_neither_tests_nor_solution_reach_the_harness_and_what_it_plants_does_not_count(
    task: Path, project: Path, model: ScriptedModelServer
) -> None:
    plants = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; : > /tests/test.sh; : > /tests/expected"
    looks = f"find {project.parent} /app /tests /logs -name solve.sh -o -name test.sh; ls /tests; ls {task} 2>&1"
    (task / "tests" / "expected").unlink()
    model.enqueue(*asks(looks, f"{plants}; echo 'print(3)' > calc.py"))
    episode = only(dev(project, model, file=FILE))
    assert 0.0 == episode.reward
    assert "" == model.calls[1].json["messages"][-1]["content"]


PLANTS = (
    "chmod 444 /logs/verifier/reward.json; chmod 555 /logs/verifier /logs",
    "cd /tests; seq -f 'x%0150.0f' 20000 | xargs touch",
    "mkdir -p /tests/a/b; touch /tests/a/b/c; chmod 555 /tests/a/b /tests/a",
)
"""Shell commands with which a harness tries to set the reward itself."""


@pytest.mark.long
@needs_bubblewrap
@pytest.mark.parametrize("plants", PLANTS)
def test_reward_that_a_harness_wrote_never_counts(
    task: Path, project: Path, model: ScriptedModelServer, plants: str
) -> None:
    model.enqueue(*asks(f"mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json; {plants}"))
    (reward,) = only(dev(project, model, file=FILE)).rewards
    assert (0.0, {}) == (reward.value, reward.dimensions), reward.feedback


@needs_bubblewrap
def test_path_of_an_image_comes_before_the_machine_s(task: Path, project: Path, model: ScriptedModelServer) -> None:
    write(task, {"environment/Dockerfile": f'{DOCKERFILE}ENV PATH="/app/bin:$PATH" LIB=$LIB:/lib\nENV PATH=/x:$PATH\n'})
    model.enqueue(*asks("echo $PATH $LIB; echo 'print(3)' > calc.py"))
    episode = only(dev(project, model, file=FILE))
    assert 1.0 == episode.reward, episode.attempt.error
    assert seen(model).startswith("/x:/app/bin:")
    assert ":/usr/bin" in seen(model)


@needs_bubblewrap
def test_tasks_outside_of_the_experiment_are_graded(
    task: Path, project: Path, model: ScriptedModelServer, tmp_path: Path
) -> None:
    tasks = (project / "tasks").rename(tmp_path / "elsewhere")
    file = FILE.replace("harbor:tasks", f"harbor:{tasks}").replace(
        'harness = "shell.toml"', f'harness = "shell.toml"\nworkspace = "harbor:{tasks}/{{name}}"'
    )
    model.enqueue(*asks("echo 'print(3)' > calc.py"))
    episode = only(dev(project, model, file=file))
    assert 1.0 == episode.reward, episode.attempt.error


WRITTEN = (
    ("echo 0.25 > reward.txt", 0.25, ""),
    ('echo \'{"reward": 0.5, "style": 1}\' > reward.json; echo 1 > reward.txt', 0.5, ""),
    ('echo \'{"goal": 1, "style": 0.5}\' > reward.json', 0.75, ""),
    ("echo nan > reward.txt", 0.0, "wrote no number"),
    ("echo 1e999 > reward.txt", 0.0, "wrote no number"),
    ("echo '{\"reward\": 1e999}' > reward.json", 0.0, "wrote no number"),
    ('echo \'{"reward": "1"}\' > reward.json', 0.0, "wrote no number"),
    ("echo done > reward.txt", 0.0, "wrote no number"),
    (": > reward.txt", 0.0, "wrote no number"),
    ("head -c 100000 /dev/zero > reward.txt", 0.0, "wrote no number"),
    ("ln -s /etc/hostname reward.txt; mkfifo reward.json", 0.0, "wrote no reward"),
    ("exit 7", 0.0, "wrote no reward (exit status 7)"),
    ("(setsid sleep 600 &); echo 1 > reward.txt", 1.0, ""),
    ("sleep 600", 0.0, "stopped at 2 s"),
)
"""Last lines of test scripts, each with the reward that it gives and a part of the feedback."""


@pytest.mark.long
@needs_bubblewrap
def test_reward_is_what_the_tests_write(task: Path, project: Path, model: ScriptedModelServer) -> None:
    for number, (script, _, feedback) in enumerate(WRITTEN):
        place = project / "tasks" / f"case-{number:02}"
        shutil.copytree(task, place)
        (place / "tests" / "test.sh").write_text(f"cd /logs/verifier\n{script}\n")
        if "stopped" in feedback:
            (place / "task.toml").write_text(CONFIG.replace("timeout_sec = 60", "timeout_sec = 2", 1))
    file = FILE.replace("harbor:tasks", "harbor:tasks/case-*")
    found = {item.rollout.task["name"]: item.rewards[0] for item in dev(project, model, file=file, tasks=99).episodes}
    rewards = [found[name] for name in sorted(found)]
    assert [(script, value) for script, value, _ in WRITTEN] == [
        (script, reward.value) for (script, _, _), reward in zip(WRITTEN, rewards, strict=True)
    ]
    assert [] == [reward for (_, _, part), reward in zip(WRITTEN, rewards, strict=True) if part not in reward.feedback]


@needs_bubblewrap
def test_tests_that_run_apart_get_the_artifacts_only(task: Path, project: Path, model: ScriptedModelServer) -> None:
    separate = CONFIG.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')
    write(
        task,
        {
            "task.toml": f'artifacts = ["/app/src/out.txt", {{ source = "/data" }}, "/nowhere"]\n{separate}',
            "tests/Dockerfile": "FROM scratch\nWORKDIR /check\nCOPY . /tests/\n",
            "tests/test.sh": "cat /app/src/out.txt /data/more /logs/artifacts/note; pwd; ls /app/src\n"
            "echo 1 > /logs/verifier/reward.txt\n",
        },
    )
    words = "echo out > out.txt; echo hidden > other.txt; echo more > /data/more; mkdir /logs/artifacts"
    model.enqueue(*asks(f"{words}; echo note > /logs/artifacts/note"))
    (reward,) = only(dev(project, model, file=FILE)).rewards
    assert (1.0, "out\nmore\nnote\n/check\nout.txt") == (reward.value, reward.feedback)


@needs_bubblewrap
def test_what_a_task_needs_and_the_sandbox_lacks_is_named_before_a_run(
    task: Path, project: Path, model: ScriptedModelServer
) -> None:
    write(task, {"environment/Dockerfile": f"{DOCKERFILE}RUN apt-get update \\\n  && apt-get install -y git\n"})
    with pytest.raises(
        ConfigError, match=r'add: its Dockerfile installs.*apt-get update && apt.*without = \["build"\]'
    ):
        dev(project, model, file=FILE)
    model.enqueue(*asks("echo 'print(3)' > calc.py"))
    assert 1.0 == only(dev(project, model, file=FILE, params='{ without = ["build"] }')).reward


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"task.toml": "steps = [{ name = 'a' }]"}, "has steps"),
        ({"task.toml": "x = "}, "is not valid TOML"),
        ({"task.toml": "[agent]\ntimeout_sec = 'soon'"}, "Expected .*agent.timeout_sec"),
        ({"task.toml": "[agent]\ntimeout_sec = -1"}, "agent.timeout_sec"),
        ({"task.toml": "[environment]\nos = 'windows'"}, "is for windows"),
        ({"task.toml": "artifacts = ['/app/../../etc/passwd']"}, "is not an absolute path"),
        ({"task.toml": "artifacts = [3]"}, "is not an absolute path"),
        ({"instruction.md": "\n"}, "is empty"),
        ({"instruction.md": "x" * (1 << 21)}, "has more than 1,048,576 bytes"),
        ({"environment/Dockerfile": "RUN true"}, "stands above FROM"),
        ({"environment/Dockerfile": "FROM x\nNONSENSE y"}, "no instruction NONSENSE"),
        ({"environment/Dockerfile": 'FROM x\nCOPY "a b'}, "No closing quotation"),
    ],
)
def test_broken_task_is_one_clear_message(task: Path, project: Path, files: dict[str, str], problem: str) -> None:
    write(task, files)
    with pytest.raises(DatasetError, match=problem):
        read_tasks("tasks", project)


@pytest.mark.parametrize("name", ["tests", "instruction.md", "environment", "environment/Dockerfile"])
def test_link_that_leads_out_of_a_task_is_refused(task: Path, project: Path, name: str) -> None:
    (project / "elsewhere").mkdir()
    (task / name).rename(project / "elsewhere" / "moved")
    (task / name).symlink_to(project / "elsewhere" / "moved")
    with pytest.raises(DatasetError, match="by a link"):
        read_tasks("tasks", project)


def test_copy_never_takes_what_is_outside_of_the_environment(task: Path) -> None:
    (task / "environment" / "all").symlink_to(task / "solution")
    (task / "environment" / "one").symlink_to(task / "solution" / "solve.sh")
    for source in ("all/solve.sh", "one", "all"):
        write(task, {"environment/Dockerfile": f"FROM x\nWORKDIR /app\nCOPY {source} /app/"})
        with pytest.raises(ConfigError, match="leads out of"):
            layout_of(load_task(task))
    write(task, {"environment/Dockerfile": "FROM x\nWORKDIR /app\nCOPY ../solution/solve.sh /app/"})
    with pytest.raises(ConfigError, match="does not exist"):
        layout_of(load_task(task))


@pytest.mark.parametrize(
    "workspace", ["harbor:../tasks", "harbor:/tmp", "harbor:a/../../b", "git:../x", "git:/tmp@HEAD"]
)
def test_task_names_no_folder_outside_of_the_experiment(
    project: Path, model: ScriptedModelServer, workspace: str
) -> None:
    (project / "tasks.jsonl").write_text(json.dumps({"prompt": "x", "workspace": workspace}) + "\n")
    file = FILE.replace("harbor:tasks", "tasks.jsonl")
    try:
        error = only(dev(project, model, file=file)).attempt.error.message
    except ConfigError as refused:
        error = str(refused)
    assert "leads out of the folder" in error


def test_tasks_are_sorted_and_chosen_by_a_pattern(task: Path, project: Path) -> None:
    for name in ("subtract", "added", "b/deep"):
        write(project / "tasks" / name, {"instruction.md": name, "task.toml": "", "tests/test.sh": "true"})
    (project / "tasks" / "notes").mkdir()

    def names(name: str) -> list[Json]:
        return [dict(found)["workspace"] for found in read_tasks(name, project) if isinstance(found, dict)]

    assert ["harbor:tasks/add", "harbor:tasks/added", "harbor:tasks/subtract"] == names("tasks")
    assert ["harbor:tasks/add", "harbor:tasks/added"] == names("tasks/add*")
    assert ["harbor:tasks/b/deep"] == names("tasks/b/*")
    assert ["harbor:tasks/add"] == names("tasks/add")
    with pytest.raises(DatasetError, match="there is no Harbor task in"):
        names("tasks/notes")


EVERYTHING = """# syntax=x
ARG V=1
FROM a AS build
WORKDIR /lost
RUN make
FROM b:$V
ENV A=1 B="two words"
ENV C ${A:-no}${NO:-yes}${B:+set} \\
  # a comment
  end
WORKDIR /w
WORKDIR sub/../x
COPY --chmod=755 ["a", "b", "to/"]
COPY --from=build /o /o
ADD https://x/y /y
RUN <<EOF
COPY not this
EOF
CMD x
"""


def test_dockerfile_is_read_as_docker_reads_it() -> None:
    image = read_dockerfile(EVERYTHING, name="it")
    assert ("/w/x", {"A": "1", "B": "two words", "C": "1yesset end"}) == (image.workdir, image.variables)
    assert [("a", "/w/x/to", True), ("b", "/w/x/to", True)] == [
        (item.source, item.target, item.is_folder) for item in image.copies
    ]
    assert ["COPY", "ADD", "RUN"] == [line.split()[0] for line in image.lacks]


def test_canaries_are_no_part_of_an_instruction(task: Path) -> None:
    assert "Make calc.py print 3.\n" == instruction_of(task)


@pytest.mark.long
@needs_bubblewrap
def test_solution_is_graded_by_a_command(task: Path, project: Path) -> None:
    def oracle(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "agl_run", "harness", "oracle", *words]
        return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)

    done = oracle("tasks")
    assert (0, "add: 1\n") == (done.returncode, done.stdout), done.stderr
    (task / "solution" / "solve.sh").write_text("echo 'print(4)' > calc.py")
    done = oracle("tasks/add", "--json")
    assert (1, "0") == (done.returncode, json.loads(done.stdout)[0]["problem"])
    (task / "solution" / "solve.sh").write_text("for i in $(seq 1500); do mkdir d; cd d; done")
    done = oracle("tasks/add")
    assert (1, True) == (done.returncode, "too deep to be copied" in done.stdout), done.stderr
    (task / "solution" / "solve.sh").unlink()
    assert "has no solution/solve.sh" in oracle("tasks/add").stdout
