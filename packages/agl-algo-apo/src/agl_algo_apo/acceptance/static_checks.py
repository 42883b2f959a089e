"""The static checks: the rules that a proposed text must follow before any rollout is paid for it.

A text that breaks a rule is rejected with a reason and never repaired, because nobody proposed the repaired text.
Candidates come from a model and are not trusted, so nothing here formats or renders one.

Demonstrations have a separate check. Each one necessarily holds the answer to a training task; one that holds a task on
which candidates are compared or scored would make those scores worthless. Such answers occur if a training task repeats
a validation task, or if an agent looks things up in files that hold both.
"""

import re
import string
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from typing import Any, cast

from agl.contracts import AlgorithmContext
from agl.errors import ConfigError
from agl.hints import did_you_mean, pip_install
from agl.schemas import Json, JsonResource, PromptTemplate, Record, Resource
from agl_algo_apo.search.settings import SearchSettings
from agl_algo_apo.texts.demonstrations import Demonstrations, as_text
from agl_algo_apo.texts.lineage import resource_of, text_of
from agl_algo_apo.texts.messages import changed_messages, check_messages, messages_of

OVERLAP_WORDS = 8
"""A text that shares this many consecutive words with a shown task counts as a copy of it."""

EDITABLE_KEYS = frozenset({"description", "help", "instructions", "prompt", "summary", "text", "title"})
"""Keys of a JSON resource whose strings may change; the agent's code depends on all other strings."""


class TextRules(Record, frozen=True, kw_only=True):
    """The rules for the texts of one resource.

    Attributes:
        name: The resource's name.
        seed: The resource from which the search started; its placeholders and structure must stay.
        invariants: Passages that every text must contain.
        max_chars: The most characters of a text; 0 for no limit.
    """

    name: str
    seed: Resource
    invariants: tuple[str, ...] = ()
    max_chars: int = 0

    def words(self) -> list[str]:
        """Return the rules as instructions for the writing model, one per line."""
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
    """Raise :class:`ConfigError` if the first text itself breaks the rules."""
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
    """Return the reason why a text may not be tried; ``""`` if it may.

    Args:
        text: The proposal.
        rules: The rules for the text.
        shown: Texts of the tasks that the proposal's author saw. The proposal may not copy them, because it would then
            score on these tasks only.
        identifiers: Words that belong to one training task (:func:`identifiers_of`); the proposal may not contain them.
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
        lost, new = sorted(had - kept), sorted(kept - had)
        parts = [f"lost the placeholders {lost}"] if lost else []
        if new:
            parts.append(f"has {new}, which the first version lacks (literal braces are written twice)")
        return "the text " + " and ".join(parts)
    return _changed_json(resource, rules.seed) or _learnt_by_heart(text, rules, shown, identifiers)


def _learnt_by_heart(text: str, rules: TextRules, shown: Sequence[str], identifiers: frozenset[str]) -> str:
    """Return a reason if a text copies a shown task or names a training task where the first text did not; else
    ``""``.
    """
    first = text_of(rules.seed, name=rules.name)
    ours = runs_of(text) - runs_of(first)
    for task in shown:
        if copied := ours & runs_of(task):
            return f"the text copies a task that its author was shown: {' '.join(sorted(copied)[0])!r}"
    named = sorted((words_of(text) - words_of(first)) & identifiers)
    return f"the text names a single training task: {named[0]!r}" if named else ""


def placeholders(resource: Resource, *, name: str) -> frozenset[str]:
    """Return the template's placeholders as written in it, including format and attribute access.

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
    """Raise :class:`ConfigError` if a placeholder of the template is neither a key of every task nor in ``filled``.

    If any task is not an object, nothing is checked, because the agent then decides what it fills in.
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
    # Statements that read other files, and attributes that leave the sandbox, count as placeholders: a proposal that
    # adds one then differs from the first version and is rejected.
    foreign = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    reaching = [type(node).__name__.lower() for node in tree.find_all(foreign)]
    private = [node.attr for node in tree.find_all(nodes.Getattr) if node.attr.startswith("_")]
    return frozenset({"{{ " + v + " }}" for v in variables} | {f"{{% {kind} %}}" for kind in reaching} | {*private})


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
        # In Python True == 1, in JSON they differ.
        is_same = type(cast("object", new)) is type(cast("object", old)) and new == old
        return "" if is_text or is_same else path
    found = (_json_difference(n, o, path=p, may_change=free) for p, n, o, free in pairs)
    return next((where for where in found if where), "")


def identifiers_of(train: Sequence[Json], others: Sequence[Json], *, hidden: Iterable[str] = ()) -> frozenset[str]:
    """Return the words with a digit that occur in exactly one training task and in no other task.

    A text with such a word contains the answer to that task, however briefly. Words without a digit are left out,
    because a good rule may well contain a word that only one task has; so are numbers of one digit.

    Args:
        train: The training tasks.
        others: The tasks that are not trained on.
        hidden: Keys that the agent does not see, so it could not recognise a task by them.
    """
    seen = Counter(word for task in (*train, *others) for word in words_of(task_text(visible(task, set(hidden)))))
    ours = {word for task in train for word in words_of(task_text(visible(task, set(hidden))))}
    return frozenset(word for word in ours if seen[word] == 1 and len(word) > 1 and any(map(str.isdigit, word)))


def visible(task: Json, hidden: Collection[str]) -> Json:
    """Return a task without its hidden keys, as the agent sees it."""
    if not isinstance(task, dict):
        return task
    return {key: value for key, value in cast("dict[str, Json]", task).items() if key not in hidden}


def words_of(text: str) -> set[str]:
    """Return the words of a text in lower case; words joined by hyphens, dots and the like count as one."""
    return {word.casefold() for word in re.findall(r"\w+(?:[-./:#]\w+)*", text)}


def runs_of(text: str) -> set[tuple[str, ...]]:
    """Return every sequence of ``OVERLAP_WORDS`` consecutive words in a text, without punctuation and in lower case."""
    words = [word.strip(".,;:!?\"'()[]{}<>").casefold() for word in text.split()]
    words = [word for word in words if word]
    return {tuple(words[i : i + OVERLAP_WORDS]) for i in range(len(words) - OVERLAP_WORDS + 1)}


def task_text(task: Json) -> str:
    """Return all strings in a task, one per line; copies are recognised by them."""
    if isinstance(task, str):
        return task
    if isinstance(task, dict):
        return task_text(list(cast("dict[str, Json]", task).values()))
    parts = cast("list[Json]", task) if isinstance(task, list) else []
    return "\n".join(task_text(part) for part in parts)


def text_rules(context: AlgorithmContext, settings: SearchSettings, *, algorithm: str) -> list[TextRules]:
    """Return the rules for every tuned text.

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
    found: list[TextRules] = []
    for name in context.tunes:
        resource = context.current(name).resource
        longest = settings.texts.max_chars or max(4000, 4 * len(text_of(resource, name=name)))
        invariants = settings.texts.invariants.get(name, ())
        found.append(TextRules(name=name, seed=resource, invariants=invariants, max_chars=longest))
        check_seed(found[-1])
        check_fields(name, resource, [*context.train, *context.val], filled=settings.texts.filled)
    return found


class ValidationMarks(Record, frozen=True, kw_only=True):
    """Words that identify held-out tasks, on which candidates are scored; demonstrations must not contain them.

    Attributes:
        names: Words with letters and digits that occur in one held-out task and in no training task.
        runs: Sequences of words that occur in held-out tasks but not in training tasks.
        inputs: Texts of the held-out tasks, as the agent sees them.
    """

    names: frozenset[str] = frozenset()
    runs: frozenset[tuple[str, ...]] = frozenset()
    inputs: frozenset[str] = frozenset()

    @classmethod
    def of(cls, held_out: Sequence[Json], train: Sequence[Json], *, hidden: Collection[str] = ()) -> "ValidationMarks":
        """Return the words, sequences of words and inputs by which these held-out tasks are recognised."""
        names = identifiers_of(held_out, train, hidden=hidden)
        seen = ([visible(task, hidden) for task in tasks] for tasks in (held_out, train))
        # The whole task as JSON if it holds no text.
        ours, theirs = ([task_text(task) or as_text(task) for task in tasks] for tasks in seen)
        return cls(
            # A plain number may well be an answer in training too.
            names=frozenset(name for name in names if re.search(r"[^\W\d_]", name)),
            runs=frozenset(run for text in ours for run in runs_of(text))
            - {r for text in theirs for r in runs_of(text)},
            inputs=frozenset(ours) | {as_text(visible(task, hidden)) for task in held_out},
        )

    def violation(self, shown: Demonstrations) -> str:
        """Return the reason why demonstrations may not be tried: they contain a held-out task. ``""`` if they may."""
        for demonstration in [demonstration for found in shown.values() for demonstration in found]:
            text = f"{demonstration.input}\n{demonstration.output}"
            named = sorted(words_of(text) & self.names)
            copied = sorted(runs_of(text) & self.runs)
            if named or copied or demonstration.input in self.inputs:
                what = named[0] if named else " ".join(copied[0]) if copied else demonstration.input[:80]
                return f"{demonstration.key} holds a validation task: {what!r}"
        return ""
