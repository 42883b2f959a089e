"""The probe of weights: written next to the weights, read back, and refused if it is malformed."""

import pytest

from agl.errors import ConfigError
from agl.schemas import PROBE_FILE, WeightsProbe, read_probe, write_probe


def test_a_probe_is_read_back_as_it_was_written(tmp_path):
    assert read_probe(tmp_path) is None
    probe = WeightsProbe(token_ids=(5, 6, 7), logprobs=(-1.25, -0.5))
    write_probe(tmp_path, probe)
    assert probe == read_probe(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a probe of weights"),
        ('{"token_ids": [1, 2], "logprobs": ["a"]}', "is not a probe of weights"),
        ('{"token_ids": [1, 2, 3], "logprobs": [-1.0]}', "3 tokens and 1 log-probabilities"),
        ('{"token_ids": [1], "logprobs": []}', "1 tokens and 0 log-probabilities"),
    ],
)
def test_a_file_that_is_no_probe_is_refused_by_its_path(tmp_path, text, message):
    (tmp_path / PROBE_FILE).write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        read_probe(tmp_path)
    assert str(tmp_path / PROBE_FILE) in str(refused.value)
