"""Reading one rollout: why each call trained or did not, its conversation, its answers, its tallies."""

from agl_inspect.rollouts.answers import answer_of, asked, encode_answer, exchanges_of, key_of, text_answer
from agl_inspect.rollouts.conversations import ShownMessages, comparable, labelled_texts
from agl_inspect.rollouts.differences import difference, ending, nearest, one_line
from agl_inspect.rollouts.explanations import explain, explain_training, reward_text, tokens_of
from agl_inspect.rollouts.origin import answer_counts
from agl_inspect.rollouts.recorded import RecordedAnswer, recorded_answers
from agl_inspect.rollouts.saved_training import is_saved
from agl_inspect.rollouts.span_reader import CHOSEN_PAGE, SpanReader
from agl_inspect.rollouts.step_tallies import AgentTally, Observed, StepTallies, StepTally, keep_tallies, read_tallies
from agl_inspect.rollouts.training_records import TrainingRecord, save_training, token_values, training_of

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
    "answer_counts",
    "answer_of",
    "asked",
    "comparable",
    "difference",
    "encode_answer",
    "ending",
    "exchanges_of",
    "explain",
    "explain_training",
    "is_saved",
    "keep_tallies",
    "key_of",
    "labelled_texts",
    "nearest",
    "one_line",
    "read_tallies",
    "recorded_answers",
    "reward_text",
    "save_training",
    "text_answer",
    "token_values",
    "tokens_of",
    "training_of",
]
