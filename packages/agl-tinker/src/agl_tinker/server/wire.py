"""Converts Tinker's messages to rows and requests of ``agl_algo_torch.serving.hosting``, and results to messages.

Rows, and the results of training and sampling, are sent as protocol buffers, whose classes come with the published
client. All other messages are JSON, read with the client's own models.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from agl_algo_torch.serving.hosting import Sample, SampleRequest, TargetRow
from agl_tinker.server.losses import built_in
from agl_tinker.server.problems import RefusedError, not_offered

M = TypeVar("M", bound=BaseModel)
_NUMPY = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
_MOST_SAMPLES = 1024
_MOST_ALTERNATIVES = 100


def read_json(content: bytes, model: type[M]) -> M:
    """Decode the body of a request; raises :class:`RefusedError`, which names the wrong fields."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        found = "; ".join(
            f"{'.'.join(str(part) for part in one['loc']) or 'body'}: {one['msg']}" for one in error.errors()[:5]
        )
        raise RefusedError(f"The request is not a {model.__name__} of tinker {_version()}: {found}.") from error


def read_training(content: bytes) -> Any:
    """Decode a ``ForwardBackwardRequest``; raises :class:`RefusedError` if it is not one, or if it holds no data."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise RefusedError("The request is not a ForwardBackwardRequest: its bytes cannot be decoded.") from error
    if not message.data:
        raise RefusedError("The request has no data. Send at least one Datum.")
    return message


def config_of(message: Any) -> dict[str, float | str]:
    """Return the parameters of a request's loss, by name."""
    newer = {
        key: value.text if value.HasField("text") else float(value.number)
        for key, value in message.loss_fn_config_v2.items()
    }
    return newer or dict(message.loss_fn_config)


def rows_of(message: Any, *, vocab_size: int, context_length: int) -> list[TargetRow]:
    """Return the rows of a request; raises :class:`RefusedError`, which names the first row that cannot be trained."""
    return [
        _row(datum, message.loss_fn, f"data[{place}]", vocab_size=vocab_size, context_length=context_length)
        for place, datum in enumerate(message.data)
    ]


def _row(datum: Any, loss: str, where: str, *, vocab_size: int, context_length: int) -> TargetRow:
    ids: list[int] = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise RefusedError(f"{where}: {not_offered('Input that is not text, such as images and audio,')}")
        ids += _whole(chunk.encoded_text.tokens, np.int32, where).tolist()
    if not 1 <= len(ids) <= context_length:
        raise RefusedError(f"{where} has {len(ids)} tokens; this model takes from 1 to {context_length}.")
    found = built_in(loss)
    given = {name: _tensor(tensor, f"{where}.{name}", length=len(ids)) for name, tensor in datum.loss_fn_inputs.items()}
    known = {"target_tokens", *found.inputs, *found.optional}
    if missing := sorted(({"target_tokens"} | set(found.inputs)) - given.keys()):
        raise RefusedError(f"{where} lacks {missing}, which the loss {loss!r} reads.")
    if unknown := sorted(given.keys() - known):
        raise RefusedError(f"{where} has {unknown}, which the loss {loss!r} does not read here; remove them.")
    targets = given.pop("target_tokens").astype(np.int64).tolist()
    if not all(0 <= token < vocab_size for token in (*ids, *targets)):
        raise RefusedError(f"{where} has token ids outside of 0 to {vocab_size - 1}.")
    if not all(bool(np.isfinite(values).all()) for values in given.values()):
        raise RefusedError(f"{where} has numbers that are not finite.")
    inputs: dict[str, Sequence[float]] = {name: values.astype(np.float32).tolist() for name, values in given.items()}
    for name in found.optional:
        inputs.setdefault(name, [1.0] * len(ids))
    return TargetRow(ids=ids, targets=targets, inputs=inputs)


def _tensor(tensor: Any, where: str, *, length: int) -> Any:
    """Return a tensor as an array with one number per position, [N]."""
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise RefusedError(f"{where}: {not_offered('A tensor of several targets for each position')}")
    dtype = _NUMPY.get(tensor.dtype)
    if dtype is None:
        raise RefusedError(f"{where} has a dtype that is neither float32 nor int64.")
    values = _whole(tensor.dense, dtype, where)
    if len(values) != length:
        raise RefusedError(f"{where} has {len(values)} numbers, and the row has {length} tokens; give one for each.")
    return values


def _whole(content: bytes, dtype: Any, where: str) -> Any:
    if len(content) % np.dtype(dtype).itemsize:
        raise RefusedError(f"{where} has {len(content)} bytes, which is not a whole number of values.")
    return np.frombuffer(content, dtype=dtype)


def training_output(loss: float, logprobs: Sequence[Sequence[float]]) -> bytes:
    """Encode a loss and the log-probabilities of each row as a ``ForwardBackwardOutput``."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = loss
    message.metrics["tokens:sum"] = float(sum(map(len, logprobs)))
    record = message.loss_fn_outputs.add()
    record.num_datums = len(logprobs)
    field = record.fields["logprobs"]
    field.dtype = pb.DTYPE_FLOAT32
    field.data = np.concatenate([np.asarray(row, dtype=np.float32) for row in logprobs]).tobytes()
    lengths = [0, *(len(row) for row in logprobs)]
    field.offsets = (np.cumsum(lengths, dtype=np.int64) * 4).tobytes()
    return message.SerializeToString()


def read_sampling(
    body: types.SampleRequest, *, vocab_size: int, context_length: int, stop_ids: frozenset[int]
) -> SampleRequest:
    """Return the sampling that a request describes; raises :class:`RefusedError` for invalid or unsupported options."""
    asked = {
        "topk_prompt_logprobs": body.topk_prompt_logprobs,
        "target_prompt_logprobs": body.target_prompt_logprobs,
        "prompt_alt_tokens_k": body.prompt_alt_tokens_k,
        "record_stability_info": body.record_stability_info,
    }
    for name, value in asked.items():
        if value:
            raise not_offered(f"The option {name!r} of sampling")
    if not all(isinstance(chunk, types.EncodedTextChunk) for chunk in body.prompt.chunks):
        raise not_offered("A prompt that is not text, such as images and audio,")
    ids = tuple(int(token) for token in body.prompt.to_ints())
    if not ids or not all(0 <= token < vocab_size for token in ids):
        raise RefusedError(f"The prompt must have at least one token, and ids from 0 to {vocab_size - 1}.")
    params = body.sampling_params
    left = context_length - len(ids)
    wanted = left if params.max_tokens is None else params.max_tokens
    if left < 1 or not 1 <= wanted <= left:
        raise RefusedError(
            f"This model's context is {context_length} tokens; the prompt has {len(ids)}, and max_tokens is "
            f"{params.max_tokens}. Shorten the prompt, or ask for from 1 to {max(left, 0)} tokens."
        )
    _check_sampling(body)
    stops, texts = _stops(params.stop, stop_ids)
    return SampleRequest(
        prompt_ids=ids,
        count=body.num_samples,
        max_tokens=wanted,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        seed=params.seed,
        stop_ids=stops,
        stop_texts=texts,
        top_logprobs=body.topk_sample_logprobs,
    )


def _check_sampling(body: types.SampleRequest) -> None:
    params = body.sampling_params
    if not 1 <= body.num_samples <= _MOST_SAMPLES or not 0 <= body.topk_sample_logprobs <= _MOST_ALTERNATIVES:
        raise RefusedError(
            f"num_samples is {body.num_samples} and topk_sample_logprobs {body.topk_sample_logprobs}; they are from 1 "
            f"to {_MOST_SAMPLES} and from 0 to {_MOST_ALTERNATIVES} here."
        )
    if not (math.isfinite(params.temperature) and params.temperature >= 0 and 0 < params.top_p <= 1):
        raise RefusedError(
            f"temperature is {params.temperature} and top_p {params.top_p}; the first is at least 0, the second above "
            "0 and at most 1."
        )
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and 1 <= last < len(body.prompt.to_ints())):
        raise RefusedError("prompt_logprobs_last_n goes with prompt_logprobs, and is below the length of the prompt.")


def _stops(stop: Any, own: frozenset[int]) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return the tokens and the texts that end an answer; the default is the model's own end tokens, ``own``."""
    if stop is None:
        return own, ()
    if isinstance(stop, str):
        return own, (stop,) if stop else ()
    tokens = frozenset(item for item in stop if isinstance(item, int))
    texts = tuple(item for item in stop if isinstance(item, str) and item)
    return (tokens | own if texts else tokens), texts


def sampling_output(
    samples: Sequence[Sample], *, prompt: Sequence[float] | None, last: int | None, alternatives: int
) -> bytes:
    """Encode samples as a ``SampleResponse``.

    Args:
        samples: The sampled sequences.
        prompt: Log-probabilities of the prompt's tokens after the first; ``None`` to send none.
        last: Send the prompt's log-probabilities only for this many last tokens; ``None`` for all.
        alternatives: Number of the most likely alternatives in each token's ``tops``; 0 to send none.
    """
    message = pb.SampleResponse()
    for one in samples:
        sequence = message.sequences.add()
        sequence.stop_reason = pb.STOP_REASON_LENGTH if one.is_cut else pb.STOP_REASON_STOP
        sequence.tokens = np.asarray(one.ids, dtype=np.int32).tobytes()
        sequence.logprobs = np.asarray(one.logprobs, dtype=np.float32).tobytes()
        if alternatives:
            top = sequence.topk_sampled_logprobs
            top.k, top.length = len(one.tops[0]), len(one.tops)
            top.token_ids = np.asarray([[i for i, _ in tops] for tops in one.tops], dtype=np.int32).tobytes()
            top.logprobs = np.asarray([[p for _, p in tops] for tops in one.tops], dtype=np.float32).tobytes()
    if prompt is not None:
        scores = np.asarray([math.nan, *prompt], dtype=np.float32)
        if last is not None:
            scores[: len(scores) - last] = math.nan
        message.prompt_logprobs = scores.tobytes()
    return message.SerializeToString()


def failure(text: str, *, is_user: bool) -> Mapping[str, str]:
    """Return the result that reports a failed request."""
    return {"error": text, "category": "user" if is_user else "server"}


def _version() -> str:
    from tinker import __version__

    return __version__
