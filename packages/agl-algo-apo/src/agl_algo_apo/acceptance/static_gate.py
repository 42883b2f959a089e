"""The static gate: the rules that a proposed text must keep before a single rollout is paid for it.

A text that breaks a rule is rejected with a reason and never repaired, because nobody proposed the repaired text.
Candidates come from a model and are not trusted, so nothing here formats or renders one.
"""

import re
import string
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from typing import Any, cast

from agl.errors import ConfigError
from agl.hints import pip_install
from agl.schemas import Json, JsonResource, PromptTemplate, Record, Resource
from agl_algo_apo.texts.lineage import resource_of, text_of
from agl_algo_apo.texts.messages import changed_messages, check_messages, messages_of

OVERLAP_WORDS = 8
"""A text with so many words in a row from a shown task counts as a copy of it."""

EDITABLE_KEYS = frozenset({"description", "help", "instructions", "prompt", "summary", "text", "title"})
"""Keys of a JSON resource whose strings may change; everything else is code to the agent."""


class TextRules(Record, frozen=True, kw_only=True):
    """The rules for the texts of one resource.

    Attributes:
        name: The resource's name.
        seed: The resource that the search started from, whose placeholders and structure must stay.
        invariants: Passages that every text must hold.
        max_chars: Most characters of a text; 0 for no limit.
    """

    name: str
    seed: Resource
    invariants: tuple[str, ...] = ()
    max_chars: int = 0

    def words(self) -> list[str]:
        """Return the rules as the model that writes reads them, one line each."""
        lines = [f"- Write at most {self.max_chars} characters."] if self.max_chars else []
        names = sorted(placeholders(self.seed, name=self.name))
        messages = messages_of(self.seed)
        if messages:
            heads = ", ".join(f"=== {role} ===" for role, _ in messages)
            lines.append(f"- It is a list of messages: keep these lines in this order, each before its text: {heads}.")
        if messages or (isinstance(self.seed, PromptTemplate) and self.seed.engine != "plain"):
            shown = ", ".join(names) if names else "none: add none"
            lines.append(f"- Keep exactly these placeholders, written exactly like this: {shown}.")
        if messages or (isinstance(self.seed, PromptTemplate) and self.seed.engine == "f-string"):
            lines.append("- Write a literal brace twice: {{ or }}.")
        if isinstance(self.seed, JsonResource) and not isinstance(self.seed.value, str) and not messages:
            keys = ", ".join(sorted(EDITABLE_KEYS))
            lines.append(f"- It is JSON: keep its structure, and change only strings under the keys {keys}.")
        lines += [f"- Keep this, word for word: {invariant}" for invariant in self.invariants]
        return lines


def check_seed(rules: TextRules) -> None:
    """Check that the first text keeps the rules itself; raises :class:`ConfigError`."""
    check_messages(rules.name, rules.seed)
    try:
        placeholders(rules.seed, name=rules.name)
    except ValueError as error:
        raise ConfigError(f"the prompt {rules.name!r} that is to be tuned is no valid template: {error}") from None
    broken = violation(text_of(rules.seed, name=rules.name), rules)
    if broken:
        raise ConfigError(f"the prompt {rules.name!r} breaks a rule itself: {broken}; change the prompt or the rule")


def violation(
    text: str, rules: TextRules, *, shown: Sequence[str] = (), identifiers: frozenset[str] = frozenset()
) -> str:
    """Return the reason why a text may not be tried, ``""`` if it may.

    Args:
        text: The proposal.
        rules: The rules for it.
        shown: Texts of the tasks that its author saw, which it may not copy: it would score on these tasks alone.
        identifiers: Words that belong to one training task (:func:`identifiers_of`), which it may not name either.
    """
    if not text.strip():
        return "the text is empty"
    if rules.max_chars and len(text) > rules.max_chars:
        return f"the text has {len(text)} characters, and {rules.max_chars} are allowed"
    missing = [invariant for invariant in rules.invariants if invariant not in text]
    if missing:
        return f"the text lost {missing[0]!r}, which must stay"
    try:
        resource = resource_of(text, rules.seed)
        moved = changed_messages(resource, rules.seed) if messages_of(rules.seed) else ""
        kept = placeholders(resource, name=rules.name)
        had = placeholders(rules.seed, name=rules.name)
    except ValueError as error:
        return f"the text is no valid template: {error}"
    if moved:
        return moved
    if kept != had:
        return _placeholder_difference(kept, had)
    return _changed_json(resource, rules.seed) or _copied(text, rules, shown) or _named(text, rules, identifiers)


def placeholders(resource: Resource, *, name: str) -> frozenset[str]:
    """Return the placeholders as they are written, format and attribute access included.

    Raises :class:`ValueError` for a template that cannot be parsed.
    """
    if messages := messages_of(resource):
        return frozenset(place for _, text in messages for place in _f_string_placeholders(text))
    if not isinstance(resource, PromptTemplate) or resource.engine == "plain":
        return frozenset()
    if resource.engine == "jinja":
        return _jinja_placeholders(resource.template, name=name)
    return frozenset(_f_string_placeholders(resource.template))


def field_names(resource: Resource, *, name: str) -> frozenset[str]:
    """Return the names of the values that a template needs."""
    if messages := messages_of(resource):
        return frozenset(field for _, text in messages for field in PromptTemplate(template=text).fields)
    if isinstance(resource, PromptTemplate) and resource.engine == "f-string":
        return resource.fields
    return frozenset(field.strip("{} ") for field in placeholders(resource, name=name) if "{{" in field)


def check_fields(name: str, resource: Resource, tasks: Sequence[Json], *, filled: Iterable[str]) -> None:
    """Check that every task can fill the template's placeholders; raises :class:`ConfigError`.

    Nothing is checked where a task is not an object: the agent then decides what it fills in.
    """
    keys = [cast("dict[str, Json]", task).keys() for task in tasks if isinstance(task, dict)]
    if not keys or len(keys) < len(tasks):
        return
    known = set[str](keys[0]).intersection(*keys[1:])
    lacking = sorted(field_names(resource, name=name) - known - set(filled))
    if lacking:
        raise ConfigError(
            f"the prompt {name!r} has the placeholders {lacking}, which not every task has; the tasks share "
            f"{sorted(known)}. Correct the prompt or the tasks, or write filled = {lacking} if the agent fills them in "
            "itself"
        )


def _f_string_placeholders(template: str) -> list[str]:
    found: list[str] = []
    for _, name, spec, conversion in string.Formatter().parse(template):
        if name is None:
            continue
        if not name:
            raise ValueError("it has an empty placeholder {}; write literal braces as {{ and }}")
        tail = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        found.append("{" + name + tail + "}")
    return found


def _jinja_placeholders(template: str, *, name: str) -> frozenset[str]:
    try:
        sandbox, meta, nodes = (import_module(f"jinja2.{part}") for part in ("sandbox", "meta", "nodes"))
    except ImportError:
        raise ConfigError(
            f"the prompt {name!r} is a jinja template, and jinja2 is not installed; "
            f"run: {pip_install('agl-algo-apo[jinja]')}"
        ) from None
    jinja2: Any = import_module("jinja2")
    try:
        tree = sandbox.SandboxedEnvironment().parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from None
    variables: set[str] = meta.find_undeclared_variables(tree)
    # Statements that read other files, and attributes that lead out of the sandbox, count as placeholders: a proposal
    # that adds one then differs from the first version and is rejected.
    foreign = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    reaching = [type(node).__name__.lower() for node in tree.find_all(foreign)]
    private = [node.attr for node in tree.find_all(nodes.Getattr) if node.attr.startswith("_")]
    return frozenset({"{{ " + v + " }}" for v in variables} | {f"{{% {kind} %}}" for kind in reaching} | {*private})


def _placeholder_difference(kept: frozenset[str], had: frozenset[str]) -> str:
    lost, new = sorted(had - kept), sorted(kept - had)
    parts = [f"lost the placeholders {lost}"] if lost else []
    if new:
        parts.append(f"has {new}, which the first version lacks (literal braces are written twice)")
    return "the text " + " and ".join(parts)


def _changed_json(resource: Resource, seed: Resource) -> str:
    if not isinstance(seed, JsonResource) or isinstance(seed.value, str) or messages_of(seed):
        return ""
    where = _json_difference(cast("JsonResource", resource).value, seed.value, path="$", may_change=False)
    return f"the JSON differs at {where} from the first version, where nothing may change" if where else ""


def _json_difference(new: Any, old: Any, *, path: str, may_change: bool) -> str:
    pairs: list[tuple[str, Any, Any, bool]]
    if isinstance(old, dict) and isinstance(new, dict):
        ours, theirs = cast("dict[str, Json]", old), cast("dict[str, Json]", new)
        if ours.keys() != theirs.keys():
            return path
        pairs = [(f"{path}.{key}", theirs[key], ours[key], key in EDITABLE_KEYS) for key in ours]
    elif isinstance(old, list) and isinstance(new, list):
        before, after = cast("list[Json]", old), cast("list[Json]", new)
        if len(before) != len(after):
            return path
        pairs = [(f"{path}[{i}]", after[i], before[i], may_change) for i in range(len(before))]
    else:
        is_text = may_change and isinstance(old, str) and isinstance(new, str)
        return "" if is_text or _is_same(cast("object", new), cast("object", old)) else path
    found = (_json_difference(n, o, path=p, may_change=free) for p, n, o, free in pairs)
    return next((where for where in found if where), "")


def _is_same(new: object, old: object) -> bool:
    """Return whether two JSON values are equal and of one type: in Python ``True == 1``, in JSON they differ."""
    return type(new) is type(old) and new == old


def _copied(text: str, rules: TextRules, shown: Sequence[str]) -> str:
    """Return the reason where a run of words comes from a shown task and not from the first version, else ``""``."""
    known = runs_of(text_of(rules.seed, name=rules.name))
    ours = runs_of(text) - known
    for task in shown:
        copied = ours & runs_of(task)
        if copied:
            return f"the text copies a task that its author was shown: {' '.join(sorted(copied)[0])!r}"
    return ""


def _named(text: str, rules: TextRules, identifiers: frozenset[str]) -> str:
    """Return the reason where a text names a single training task and the first version does not, else ``""``."""
    named = sorted((words_of(text) - words_of(text_of(rules.seed, name=rules.name))) & identifiers)
    return f"the text names a single training task: {named[0]!r}" if named else ""


def identifiers_of(train: Sequence[Json], others: Sequence[Json], *, hidden: Iterable[str] = ()) -> frozenset[str]:
    """Return the words that tell one training task from all others: with a digit, and in no other task.

    A text that names one holds what to answer in that task, however short it says so. Words without a digit are left
    out, because a good rule may well hold a word that only one task has; numbers of one digit too.

    Args:
        train: The training tasks.
        others: The tasks that are not trained on.
        hidden: Keys that the agent does not see; it could not recognise a task by them.
    """
    seen = Counter(word for task in (*train, *others) for word in words_of(task_text(visible(task, set(hidden)))))
    ours = {word for task in train for word in words_of(task_text(visible(task, set(hidden))))}
    return frozenset(word for word in ours if seen[word] == 1 and len(word) > 1 and any(map(str.isdigit, word)))


def visible(task: Json, hidden: Collection[str]) -> Json:
    """Return a task as the agent sees it."""
    if not isinstance(task, dict):
        return task
    return {key: value for key, value in cast("dict[str, Json]", task).items() if key not in hidden}


def words_of(text: str) -> set[str]:
    """Return the words of a text without their case; those joined by hyphens, dots and the like are one."""
    return {word.casefold() for word in re.findall(r"\w+(?:[-./:#]\w+)*", text)}


def runs_of(text: str) -> set[tuple[str, ...]]:
    """Return every run of ``OVERLAP_WORDS`` words, without punctuation and case."""
    words = [word.strip(".,;:!?\"'()[]{}<>").casefold() for word in text.split()]
    words = [word for word in words if word]
    return {tuple(words[i : i + OVERLAP_WORDS]) for i in range(len(words) - OVERLAP_WORDS + 1)}


def task_text(task: Json) -> str:
    """Return a task's strings, one a line, by which a copy of it is recognised."""
    if isinstance(task, str):
        return task
    if isinstance(task, dict):
        return task_text(list(cast("dict[str, Json]", task).values()))
    parts = cast("list[Json]", task) if isinstance(task, list) else []
    return "\n".join(task_text(part) for part in parts)
