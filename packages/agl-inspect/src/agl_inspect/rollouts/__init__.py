"""Reading one rollout: why each call trained or did not, its conversation, its answers, its tallies."""

from agl_inspect.rollouts.answers import (
    RecordedAnswer,
    answer_counts,
    answer_of,
    asked,
    encode_answer,
    exchanges_of,
    key_of,
    recorded_answers,
    text_answer,
)
from agl_inspect.rollouts.conversations import (
    ShownMessages,
    comparable,
    contents_of,
    difference,
    ending,
    labelled_texts,
    nearest,
)
from agl_inspect.rollouts.explanations import call_facts, explain, explain_training, reward_text, tokens_of
from agl_inspect.rollouts.span_reader import CHOSEN_PAGE, SpanReader, in_tree, read_episode, reward_of
from agl_inspect.rollouts.step_tallies import AgentTally, Observed, StepTallies, StepTally, add_tallies, read_tallies
from agl_inspect.rollouts.training import TrainingRecord, is_saved, save_training, token_values, training_of

__all__ = [
    "CHOSEN_PAGE",
    "AgentTally",
    "Observed",
    "RecordedAnswer",
    "ShownMessages",
    "SpanReader",
    "StepTallies",
    "StepTally",
    "TrainingRecord",
    "add_tallies",
    "answer_counts",
    "answer_of",
    "asked",
    "call_facts",
    "comparable",
    "contents_of",
    "difference",
    "encode_answer",
    "ending",
    "exchanges_of",
    "explain",
    "explain_training",
    "in_tree",
    "is_saved",
    "key_of",
    "labelled_texts",
    "nearest",
    "read_episode",
    "read_tallies",
    "recorded_answers",
    "reward_of",
    "reward_text",
    "save_training",
    "text_answer",
    "token_values",
    "tokens_of",
    "training_of",
]
