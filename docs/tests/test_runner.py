"""The pages' tests can fail: each kind of block, broken, is refused."""

import pytest

from agl.errors import ConfigError

BROKEN = {
    "python that raises": ("```python\nassert 1 == 2\n```\n", AssertionError, None),
    "python that awaits and raises": (
        "```python\nimport asyncio\n\nawait asyncio.sleep(0)\n1 / 0\n```\n",
        ZeroDivisionError,
        None,
    ),
    "file with bad syntax": ('```python title="a.py"\ndef\n```\n', SyntaxError, "invalid syntax"),
    "json that is none": ('```json title="a.jsonl"\n{"a": }\n```\n', ValueError, None),
    "experiment with an unknown key": ("```toml\n[experiment]\nsede = 1\n```\n", ConfigError, "did you mean 'seed'"),
    "output that differs": ("```console\n$ agl --version\nversion 9\n```\n", AssertionError, "lacks 'version 9'"),
    "command that fails": ("```console\n$ agl check none.toml\n```\n", AssertionError, "no experiment file"),
    "program that is not known": ("```console\n$ rm -r x\n```\n", AssertionError, "cannot run 'rm'"),
    "block without commands": ("```console\nagl --version\n```\n", AssertionError, "lines that start with"),
    "language without a rule": ("```ruby\nputs 1\n```\n", pytest.fail.Exception, "no rule"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_block_is_refused(name, run_page, tmp_path):
    text, error, message = BROKEN[name]
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message):
        run_page(page)


def test_blocks_share_a_namespace_and_the_folder(run_page, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        '```text title="a.txt"\nhello\n```\n'
        "```python\nfound = __import__('pathlib').Path('a.txt').read_text()\n```\n"
        "```python\nassert found == 'hello\\n'\n```\n"
        "```console\n$ NAME=agl python -c \"import os; print(os.environ['NAME'], 'is', 'here')\"\nagl ... here\n```\n",
        encoding="utf-8",
    )
    run_page(page)
