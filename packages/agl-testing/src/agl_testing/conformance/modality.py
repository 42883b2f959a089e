"""The conformance class of modalities: random pictures in random texts give what the family's own processor gives."""

# ruff: noqa: D102  # the names of the tests say what holds

import random
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from agl.contracts import Modality
from agl.schemas import Blob, digest_of
from agl_testing.conformance._base import Conformance

SEEDS = range(12)
"""Seeds of the random prompts; each has a picture more than the last, from none to three."""


@dataclass(frozen=True, kw_only=True)
class ModalityCase:
    """A modality under test, and the processor that it has to agree with.

    Attributes:
        modality: The modality.
        placeholder: Id of the token that stands for a picture in the ids of a rendered chat.
        words: Ids of other tokens, of which the random texts consist.
        reference: Returns what the family's processor makes of such ids and pictures: `ids`, `positions` (or None), and
            the tensors of the pictures by their names.
    """

    modality: Modality
    placeholder: int
    words: Sequence[int]
    reference: Callable[[Sequence[int], Sequence[Blob]], Mapping[str, Any]]


class ModalityConformance(Conformance):
    """Run every test of the modality contract.

    .. code-block:: python

        class TestMyVision(ModalityConformance):
            @pytest.fixture
            def case(self):
                return ModalityCase(modality=MyVision(model="tiny"), placeholder=7, words=range(5), reference=processed)
    """

    contract: ClassVar[str] = "modality"

    @pytest.fixture
    def case(self) -> ModalityCase:
        """The modality under test with its reference; the only fixture to override."""
        raise NotImplementedError("override the fixture 'case' with the modality under test")

    def test_ids_positions_and_tensors_are_those_of_the_processor(self, case: ModalityCase) -> None:
        for ids, blobs in _prompts(case):
            found, spans = case.modality.expand(ids, blobs)
            expected = dict(case.reference(ids, blobs))
            assert expected.pop("ids") == found
            _agree(expected.pop("positions"), case.modality.positions(found, spans))
            features = case.modality.features(blobs, spans)
            assert expected.keys() == features.keys()
            for name, tensor in expected.items():
                _agree(tensor, features[name])

    def test_spans_cover_the_placeholders_in_order(self, case: ModalityCase) -> None:
        for ids, blobs in _prompts(case):
            found, spans = case.modality.expand(ids, blobs)
            assert [blob.digest for blob in blobs] == [span.digest for span in spans]
            covered = [place for span in spans for place in range(span.offset, span.offset + span.length)]
            assert sorted(set(covered)) == covered
            assert {place for place, token in enumerate(found) if token == case.placeholder} <= set(covered)

    def test_spans_are_found_again_in_expanded_ids(self, case: ModalityCase) -> None:
        for ids, blobs in _prompts(case):
            found, spans = case.modality.expand(ids, blobs)
            assert spans == case.modality.spans(found, blobs)

    def test_ids_of_other_pictures_are_refused(self, case: ModalityCase) -> None:
        found, _ = case.modality.expand([case.placeholder], [_picture(random.Random(1))])
        for ids, blobs in (([*found, *found], 1), (found, 0), (found, 2), (list(case.words[:2]), 1)):
            with pytest.raises(ValueError):
                case.modality.spans(ids, [_picture(random.Random(1))] * blobs)

    def test_number_of_placeholders_is_that_of_the_pictures(self, case: ModalityCase) -> None:
        for placeholders, pictures in ((1, 0), (0, 1), (2, 1)):
            with pytest.raises(ValueError):
                case.modality.expand([case.placeholder] * placeholders, [_picture(random.Random(1))] * pictures)

    def test_data_that_is_no_picture_is_refused(self, case: ModalityCase) -> None:
        whole = _picture(random.Random(1)).data
        for data in (b"", b"<svg/>", whole[: len(whole) // 2]):
            with pytest.raises(ValueError):
                case.modality.expand(
                    [case.placeholder], [Blob(digest=digest_of(data), media_type="image/png", data=data)]
                )

    def test_placeholders_are_banned(self, case: ModalityCase) -> None:
        assert case.placeholder in case.modality.banned
        assert not case.modality.banned & set(case.words)

    def test_threads_get_what_one_thread_gets(self, case: ModalityCase) -> None:
        prompts = _prompts(case)
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda prompt: case.modality.expand(*prompt), prompts * 2))
        assert [case.modality.expand(*prompt) for prompt in prompts * 2] == found


def _prompts(case: ModalityCase) -> list[tuple[list[int], list[Blob]]]:
    """Random texts with pictures in them, as ids with one placeholder for each picture."""
    found: list[tuple[list[int], list[Blob]]] = []
    for seed in SEEDS:
        rng = random.Random(seed)
        ids = rng.choices(case.words, k=rng.randrange(1, 9))
        for _ in range(seed % 4):
            ids += [case.placeholder, *rng.choices(case.words, k=rng.randrange(1, 9))]
        found.append((ids, [_picture(rng) for _ in range(seed % 4)]))
    return found


def _picture(rng: random.Random) -> Blob:
    """A random picture of up to 40 by 40 pixels as PNG."""
    width, height = rng.randrange(4, 40), rng.randrange(4, 40)
    rows = b"".join(b"\0" + rng.randbytes(3 * width) for _ in range(height))
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    return Blob(digest=digest_of(data), media_type="image/png", data=data)


def _agree(expected: Any, found: Any) -> None:
    """Compare tensors of any library, or None, by value and shape."""
    assert (expected is None) == (found is None)
    if expected is not None:
        assert tuple(expected.shape) == tuple(found.shape)
        assert bool((expected == found).all())
