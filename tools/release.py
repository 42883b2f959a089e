"""Builds every package as it is uploaded, checks it, and prints the upload: ``python -m tools.release [VERSION]``.

A package's page on an index has no files beside it, so each package is built from a copy whose README links lead to
the repository at the release's tag, with the repository's addresses in its metadata. The address is named when a
release is made, with ``--repository``; no file of the checkout holds it.
"""

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.public import ROOT

LINK = re.compile(r"\]\((?!https?://|#)([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.egg-info", ".pytest_cache", "dist", "build")
URLS = """
[project.urls]
Homepage = "{repository}"
Documentation = "{repository}/blob/{tag}/docs/index.md"
Changelog = "{repository}/blob/{tag}/CHANGELOG.md"
Issues = "{repository}/issues"
Source = "{repository}/tree/{tag}/packages/{name}"
"""


def projects() -> dict[str, dict[str, Any]]:
    """The ``[project]`` table of every package, each after the packages that it depends on."""
    tables = {file.parent.name: _table(file) for file in sorted(ROOT.glob("packages/*/pyproject.toml"))}

    def in_order(names: Sequence[str]) -> Iterator[str]:
        for name in names:
            yield from in_order([other for other in needs_of(tables[name]) if other in tables])
            yield name

    return {name: tables[name] for name in in_order(list(tables))}


def needs_of(project: dict[str, Any]) -> list[str]:
    """The names of the distributions that a project depends on."""
    return [re.split(r"[^\w-]", line, maxsplit=1)[0] for line in project["dependencies"]]


def set_version(version: str) -> None:
    """Write ``version`` into every package, with the bounds on other packages of ours that follow from it."""
    major, minor, _ = version.split(".")
    bound = rf"\1>={major}.{minor},<{major}.{int(minor) + 1}"
    for file in ROOT.glob("packages/*/pyproject.toml"):
        text = re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', file.read_text(encoding="utf-8"))
        file.write_text(re.sub(r"(agl-[\w-]+(?:\[[\w,-]+\])?)>=[\d.]+,<[\d.]+", bound, text), encoding="utf-8")


def entries() -> list[Path]:
    """The entries of the next release: ``changes/NAME.KIND.md``."""
    return sorted(ROOT.glob("changes/*.md"))


def absolute_links(text: str, *, page: str, base: str) -> str:
    """``text`` with the relative links of ``page``, a path in the repository, made absolute below ``base``."""

    def absolute(match: re.Match[str]) -> str:
        return f"]({base}/{posixpath.normpath(posixpath.join(posixpath.dirname(page), match[1]))})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(absolute, part) for part in parts)


def stage(package: Path, folder: Path, *, repository: str) -> None:
    """Copy a package to ``folder`` as its page needs it: absolute links, and addresses in its metadata."""
    shutil.copytree(package, folder, ignore=NOT_COPIED)
    if not repository:
        return
    project = _table(package / "pyproject.toml")
    tag = f"v{project['version']}"
    readme, metadata = folder / "README.md", folder / "pyproject.toml"
    text, base = readme.read_text(encoding="utf-8"), f"{repository}/blob/{tag}"
    readme.write_text(absolute_links(text, page=f"packages/{package.name}/README.md", base=base), encoding="utf-8")
    urls = URLS.format(repository=repository, tag=tag, name=package.name)
    metadata.write_text(metadata.read_text(encoding="utf-8") + urls, encoding="utf-8")


def build(out: Path, *, repository: str, names: Sequence[str]) -> list[Path]:
    """Build source and wheel distributions of the packages ``names`` into ``out``; returns them in order of upload."""
    staged = out / "staged"
    shutil.rmtree(out, ignore_errors=True)
    for name in names:
        stage(ROOT / "packages" / name, staged / name, repository=repository)
        _run("build", "-q", "--installer=uv", f"--outdir={out}", str(staged / name))
    shutil.rmtree(staged)
    return [file for name in names for file in sorted(out.glob(f"{name.replace('-', '_')}-*"))]


def main() -> None:
    """Build, check and print."""
    args = _arguments()
    if args.version:
        set_version(args.version)
        if entries():
            _run("towncrier", "build", "--yes", "--name", "agl", "--version", args.version)
    every = projects()
    names = args.package or list(every)
    files = build(args.out, repository=args.repository.rstrip("/"), names=names)
    _run("twine", "check", "--strict", *map(str, files))
    if not args.repository:
        print("\nThe packages name no address of their repository, and the links of their READMEs lead nowhere from")
        print("a package's page: before an upload, build again with --repository https://HOST/OWNER/NAME.")
    version = next(iter(every.values()))["version"]
    print(f"\nTo publish {version}, tag the commit and upload, a package after what it depends on:\n")
    print(f"    git tag v{version} && git push origin v{version}")
    print("    twine upload " + " ".join(f"{args.out}/{name.replace('-', '_')}-*" for name in names))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s release --", description=__doc__)
    parser.add_argument("version", nargs="?", help="set this version in every package first, such as 0.2.0")
    parser.add_argument("--repository", default="", help="the repository's public address: https://HOST/OWNER/NAME")
    parser.add_argument("--package", action="append", help="build only this package; may be repeated")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the distributions, which is emptied")
    return parser.parse_args()


def _table(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))["project"]


def _run(module: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", module, *words], check=True)


if __name__ == "__main__":
    main()
