"""The Prometheus rules in the documentation of alerts work on the metrics that a gateway exports."""

import re
from pathlib import Path

import aiohttp

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "alerts.md"


async def test_every_metric_of_the_rules_is_one_of_the_gateway_and_rates_are_those_of_counters(serving) -> None:
    rules = re.search(r'```yaml title="agl-rules.yaml"\n(.*?)```', PAGE.read_text("utf-8"), re.DOTALL)
    assert rules is not None
    expressions = re.findall(r"expr: (.*)", rules[1])
    wanted = {name for text in expressions for name in re.findall(r"\bagl_\w+", text)}
    async with serving() as it, aiohttp.ClientSession() as session, session.get(f"{it.url}/metrics") as answer:
        kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", await answer.text(), re.MULTILINE))

    assert 6 == len(expressions)
    assert 7 == len(wanted)
    assert wanted <= kinds.keys()
    counted = {name for text in expressions for name in re.findall(r"(?:rate|increase)\((\w+)\[", text)}
    assert counted == {name for name in wanted if kinds[name] == "counter"}
