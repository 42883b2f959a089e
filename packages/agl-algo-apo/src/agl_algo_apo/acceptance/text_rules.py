"""The rules of all texts that a search tunes, from its settings and the tasks."""

from agl.contracts import AlgorithmContext
from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl_algo_apo.acceptance.static_gate import TextRules, check_fields, check_seed
from agl_algo_apo.search.settings import SearchSettings
from agl_algo_apo.texts.lineage import text_of


def text_rules(context: AlgorithmContext, settings: SearchSettings, *, algorithm: str) -> list[TextRules]:
    """Return the rules of every tuned text.

    Raises:
        ConfigError: There is nothing to tune, a setting names another resource, or a text breaks its own rules.
    """
    if not context.tunes:
        raise ConfigError(
            f"{algorithm} has no prompt to tune; set tunes to a [resource.NAME] with a template or a value"
        )
    unknown = sorted({*settings.texts.invariants, *settings.texts.roles} - set(context.tunes))
    if unknown:
        hint = did_you_mean(unknown[0], context.tunes, otherwise=f"this algorithm tunes {list(context.tunes)}")
        raise ConfigError(f"invariants or roles name {unknown}, which {algorithm} does not tune; {hint}")
    return [_rules_of(name, context, settings) for name in context.tunes]


def _rules_of(name: str, context: AlgorithmContext, settings: SearchSettings) -> TextRules:
    resource = context.current(name).resource
    text = text_of(resource, name=name)
    longest = settings.texts.max_chars or max(4000, 4 * len(text))
    rules = TextRules(name=name, seed=resource, invariants=settings.texts.invariants.get(name, ()), max_chars=longest)
    check_seed(rules)
    check_fields(name, resource, [*context.train, *context.val], filled=settings.texts.filled)
    return rules
