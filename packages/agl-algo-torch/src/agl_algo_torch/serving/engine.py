"""Generates in batches over one causal LM, in a separate thread; requests join and leave the batch between tokens.

Every turn of the thread is one token boundary. Cancelled rows are removed, a due weight swap is applied, and waiting
requests are prefilled and join. Then one forward pass draws one token for every row.

transformers also has continuous batching (`init_continuous_batching`, version 5.23). It runs on a CPU, and its
log-probabilities agree with a recompute to 5e-7, but it
- has no seed per request, and re-seeds the process's global random state, which training shares;
- either samples or takes the maximum for all requests, and offers temperature or top-p per request only if the
  generation config was built with values that are not neutral;
- returns no alternatives (`top_logprobs`), and reports the log-probability after top-k and top-p;
- has no token boundary at which weights can change, so new weights would reuse prefixes of the old weights.
This engine uses the model's forward pass with its masks, the `Cache` interface and the warpers of transformers.

Prompts reuse the keys and values of the longest stored prefix (earlier turns, siblings of a group, a common system
prompt). Identical prompts that wait together are computed once. A weight swap removes all prefixes.

Pictures are compared by their digests, not by their placeholders. The model gets those that its cache does not hold
yet, and positions with every pass: it would remember those of the last pass with pictures, and use them for others.

The caller sets the number of threads with `torch.set_num_threads`; one is fastest for models below a few million
parameters.
Limits: one device; the batch reads masked columns up to its longest row, so one very long row slows its neighbours.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from agl_algo_torch.learner.typed_torch import numbers
from agl_algo_torch.serving.kvcache import (
    BatchCache,
    CacheLayout,
    cache_argument,
    forward_arguments,
    has_sliding_window,
)
from agl_algo_torch.serving.prefixes import PrefixStore
from agl_algo_torch.serving.sampling import draw
from agl_algo_torch.serving.sequence import (
    EngineError,
    EngineStoppedError,
    Event,
    Flight,
    GenerationRequest,
    PromptError,
    QueueFullError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from agl.contracts import Modality
    from agl.schemas import Blob, MediaSpan
    from agl_algo_torch.serving.kvcache import KeyValues, TokenArray

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Limits of an engine.

    Attributes:
        max_rows: Largest number of sequences that run at once.
        max_waiting: Largest number of sequences that wait; more are refused.
        prefill_tokens: Prompt tokens, padding included, that are computed between two tokens of the running rows. The
            rows wait for that computation. A prompt with more tokens is computed alone.
        prefix_bytes: Memory for prefixes; 0 turns their reuse off.
        seed: Seed of the draws of requests without a seed.
    """

    max_rows: int = 64
    max_waiting: int = 1024
    prefill_tokens: int = 2048
    prefix_bytes: int = 256 * 2**20
    seed: int = 0


@dataclass(slots=True)
class _Swap:
    """A requested change of weights; running rows may finish until `deadline`, on the monotonic clock."""

    apply: Callable[[nn.Module], None]
    version: str
    deadline: float
    done: Future[None]


@dataclass(slots=True)
class _Scoring:
    """A prompt whose tokens are to be scored, and the future of the scores."""

    ids: Sequence[int]
    done: Future[list[float]]


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """The engine's counters since its start."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    swaps: int = 0


class Engine:
    """Generates for any number of callers; `submit`, `cancel` and `swap` may be called from any thread.

    The engine owns `model` and sets it to evaluation mode. Change its weights through `swap` only.

    Args:
        model: A Hugging Face causal LM on the device that it runs on.
        version: Version of the model's current weights.
        settings: Limits.
        modality: Gives the tensors and positions of pictures, and the ids that are never drawn.

    Attributes:
        settings: Limits.
        version: Version of the weights that generate now.
        vocab_size: Number of token ids, which start at 0.
        stats: Counters, which the engine's thread updates.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        version: str = "0",
        settings: EngineSettings | None = None,
        modality: Modality | None = None,
    ) -> None:
        config = cast("Any", model).config.get_text_config()
        self.settings = settings or EngineSettings()
        self.version = version
        self.stats = EngineStats()
        self._model = model.eval()
        self._device = next(model.parameters()).device
        self._modality = modality
        self._banned = torch.tensor(sorted(modality.banned if modality else ()), device=self._device)
        self.vocab_size = int(config.vocab_size)
        self._options = forward_arguments(model) & {"position_ids", "logits_to_keep"}
        self._cache_argument = cache_argument(model)
        self._layout = CacheLayout.of(self._model)
        self._cache = BatchCache(self._layout)
        self._scratch = BatchCache(self._layout)
        reuses = not has_sliding_window(model)
        self._prefixes = PrefixStore(max_bytes=self.settings.prefix_bytes if reuses else 0)
        self._seeds = random.Random(self.settings.seed)
        self._running: list[Flight] = []
        self._waiting: deque[Flight] = deque()
        self._inbox: list[Flight] = []
        self._swaps: deque[_Swap] = deque()
        self._scorings: deque[_Scoring] = deque()
        self._wake = threading.Condition()
        self._is_stopping = self._is_blocked = False  # blocked: no request that waits now may join the rows of now
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the engine's thread; idempotent. Raises EngineStoppedError after `stop`."""
        if self._is_stopping:
            raise EngineStoppedError("The engine was stopped and cannot start again; construct a new policy.")
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="agl-engine", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop after the current token; sequences that have not finished get an EngineStoppedError. Idempotent."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def submit(
        self, requests: Sequence[GenerationRequest], *, listeners: Sequence[Callable[[Event], None]]
    ) -> list[Flight]:
        """Queue all of the requests, or none; returns their flights in the same order.

        The listener of each request gets its events, in the engine's thread, and must not block.
        Raises PromptError, QueueFullError or EngineStoppedError.
        """
        for ids in {id(request.prompt_ids): request.prompt_ids for request in requests}.values():  # siblings share one
            self._check(ids)
        flights = [
            Flight(request=request, listener=listener, uniforms=self._uniforms(request.params.seed))
            for request, listener in zip(requests, listeners, strict=True)
        ]
        with self._wake:
            if self._is_stopping:
                raise EngineStoppedError("The policy server is stopping; start it again before calling it.")
            waiting = Counter(flight.request.attempt for flight in (*self._inbox, *self._waiting))
            limit, attempt = self.settings.max_waiting, requests[0].attempt
            share = share_of(limit) if attempt and waiting else limit  # an empty queue takes whatever fits
            if waiting.total() + len(flights) > limit or waiting[attempt] + len(flights) > share:
                raise QueueFullError(
                    f"{waiting.total()} requests are waiting already; at most {limit} may wait, and {share_of(limit)} "
                    "of one attempt. "
                    "Lower the runner's concurrency or raise the policy's max_waiting."
                )
            self._inbox.extend(flights)
            self._wake.notify()
        return flights

    def _check(self, ids: Sequence[int]) -> None:
        """Raise PromptError for a prompt with an invalid token id, which on a GPU would break the whole process."""
        if not ids:
            raise PromptError("The prompt has no tokens; give at least one.")
        odd = next((i for i in (min(ids), max(ids)) if not 0 <= i < self.vocab_size), None)
        if odd is not None:
            raise PromptError(
                f"The prompt has the token id {odd}, but the model has ids from 0 to {self.vocab_size - 1}. "
                "Use the tokenizer that belongs to the model."
            )

    def _uniforms(self, seed: int | None) -> random.Random:
        """Return the random generator for a sequence; without a seed it depends on the order of the requests."""
        return random.Random(self._seeds.getrandbits(62) if seed is None else seed)

    def snapshot(self) -> dict[str, int]:
        """Return the counters since the start, and the current numbers of running and waiting sequences."""
        waiting = len(self._inbox) + len(self._waiting)
        return {"running": len(self._running), "waiting": waiting, **asdict(self.stats)}

    def cancel(self, flights: Sequence[Flight]) -> None:
        """Remove sequences at the next token boundary; their listeners get no more events. Ignores finished ones."""
        for flight in flights:
            flight.is_cancelled = True

    def swap(self, apply: Callable[[nn.Module], None], *, version: str, drain_s: float = 30.0) -> Future[None]:
        """Change the weights by `apply(model)` at a token boundary; the future is done once the new weights serve.

        Running rows finish on the old weights while new requests wait, for at most `drain_s` seconds. Rows that still
        run after that time continue on the new weights from recomputed keys and values, and their version spans show
        the change. If `apply` raises, the future gets the exception, and the engine continues with the old version.
        Cancelling the future before the swap begins withdraws the swap.
        """
        swap = _Swap(apply, version, time.monotonic() + drain_s, Future())
        with self._wake:
            if self._is_stopping:
                raise EngineStoppedError("The policy server is stopping; its weights cannot change any more.")
            self._swaps.append(swap)
            self._wake.notify()
        return swap.done

    def score(self, ids: Sequence[int]) -> Future[list[float]]:
        """Return a future of the log-probabilities of all tokens but the first, at temperature 1, in nats.

        It takes one forward pass between two tokens of the running rows, one prompt at a time.
        Raises PromptError or EngineStoppedError; the future raises EngineError if the pass fails.
        """
        self._check(ids)
        scoring = _Scoring(ids, Future())
        with self._wake:
            if self._is_stopping:
                raise EngineStoppedError("The policy server is stopping; start it again before calling it.")
            self._scorings.append(scoring)
            self._wake.notify()
        return scoring.done

    def _loop(self) -> None:
        while self._receive():
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - isolation point: one bad pass must not end the server
                _log.exception("a generation step failed; every running request is answered with its error")
                self._fail(EngineError(f"Generation failed: {type(error).__name__}: {error}."), self._running)
                self._reset()
        stopped = EngineStoppedError("The policy server was stopped before this request finished.")
        self._fail(stopped, [*self._running, *self._waiting, *self._inbox])
        for job in (*self._swaps, *self._scorings):
            if job.done.set_running_or_notify_cancel():
                job.done.set_exception(stopped)

    def _receive(self) -> bool:
        """Wait for work and take new requests; returns false if the engine must stop."""
        with self._wake:
            while not (self._is_stopping or self._inbox or self._waiting or self._running or self._has_jobs()):
                self._wake.wait()
            if self._inbox:
                self._is_blocked = False
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            return not self._is_stopping

    def _turn(self) -> None:
        """Do the work of one token boundary, then draw a token for every running row."""
        self._drop_cancelled()
        self._swap_if_due()
        self._score_next()
        if not self._swaps:  # new requests wait for a pending swap, or the rows would never drain
            self._admit()
        if self._running:
            self._step()

    def _drop_cancelled(self) -> None:
        self._evict([row for row, flight in enumerate(self._running) if flight.is_cancelled])
        if any(flight.is_cancelled for flight in self._waiting):
            self._waiting = deque(flight for flight in self._waiting if not flight.is_cancelled)
            self._is_blocked = False

    def _swap_if_due(self) -> None:
        if not self._swaps or (self._running and time.monotonic() < self._swaps[0].deadline):
            return
        swap = self._swaps.popleft()
        if not swap.done.set_running_or_notify_cancel():
            return  # the swap was withdrawn; its caller may already overwrite the new weights
        # Rows that have not finished go back to the front of the queue with the tokens generated so far.
        self._waiting.extendleft(reversed(self._running))
        self._running = []
        self._reset()
        try:
            swap.apply(self._model)
        except Exception as error:  # noqa: BLE001 - isolation point: the caller gets it
            swap.done.set_exception(error)
            return
        self._model.eval()
        self.version = swap.version
        self.stats.swaps += 1
        swap.done.set_result(None)

    def _has_jobs(self) -> bool:
        return bool(self._swaps or self._scorings)

    @torch.inference_mode()
    def _score_next(self) -> None:
        if not self._scorings:
            return
        scoring = self._scorings.popleft()
        if not scoring.done.set_running_or_notify_cancel():
            return
        try:
            ids_T = torch.tensor(scoring.ids, device=self._device)
            logits_T_V = self._model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float()
            logp_T_V = self._allowed(logits_T_V).log_softmax(1)
            scoring.done.set_result(numbers(logp_T_V.gather(1, ids_T[1:, None])[:, 0]))
        except Exception as error:  # noqa: BLE001 - isolation point: the caller gets it
            scoring.done.set_exception(EngineError(f"Scoring failed: {type(error).__name__}: {error}."))

    def _reset(self) -> None:
        self._running, self._is_blocked = [], False
        self._cache, self._scratch = BatchCache(self._layout), BatchCache(self._layout)
        self._prefixes.clear()

    def _fail(self, error: EngineError, flights: Sequence[Flight]) -> None:
        for flight in flights:
            if not flight.is_cancelled:
                flight.listener(error)

    def _admit(self) -> None:
        rows = self.settings.max_rows - len(self._running)
        if self._is_blocked or not rows or not self._waiting:
            return
        taken = Counter(flight.request.attempt for flight in self._running)
        has_others = len({*taken, *(flight.request.attempt for flight in self._waiting)}) > 1
        admissions = pick(
            self._waiting,
            rows=rows,
            taken=taken,
            share=share_of(self.settings.max_rows) if has_others else self.settings.max_rows,
            prefill_tokens=self.settings.prefill_tokens,
            prefixes=self._prefixes,
        )
        self._is_blocked = not admissions
        if admissions:
            self._prefill(admissions)

    def _prefill(self, admissions: list[Admission]) -> None:
        """Compute new prompts in one pass, add their flights to the batch, and draw the first token of each."""
        # The flights count as running before the pass, so that their listeners get the error if it fails.
        first = len(self._running)
        self._running += [flight for admission in admissions for flight in admission.flights]
        width = max(admission.new for admission in admissions)
        cache = self._scratch
        cache.begin([admission.prefix for admission in admissions], new_tokens=width)
        new = [admission.new for admission in admissions]
        ids, positions = padded(admissions, width)
        if self._modality is not None and any(admission.media for admission in admissions):
            positions = with_pictures(positions, admissions, self._modality)
        logits = self._forward(cache, ids, positions, new=new, pictures=self._pictures(admissions))
        for row, admission in enumerate(admissions):
            computed = cache.row(row, tokens=admission.new)
            parts = [computed] if admission.prefix is None else [admission.prefix, computed]
            for _ in admission.flights:
                self._cache.add(parts)
            last = len(self._cache.lengths) - 1
            self._prefixes.add(admission.identity, self._cache.row(last, tokens=len(admission.tokens)))
            self.stats.prefilled_tokens += admission.new
            self.stats.cached_tokens += admission.shared
        # The row of the logits for each flight that joins: siblings share one prompt, and one row.
        source = [row for row, admission in enumerate(admissions) for _ in admission.flights]
        self._draw(logits[source], first=first)

    def _pictures(self, admissions: Sequence[Admission]) -> dict[str, Any]:
        """Return the model's arguments for the pictures in the tokens to compute, in the order of the rows."""
        new = [picture for admission in admissions for picture in admission.pictures]
        if self._modality is None or not new:
            return {}
        given = self._modality.features([blob for _, blob in new], [span for span, _ in new])
        return {name: value.to(self._device) for name, value in given.items()}

    def _step(self) -> None:
        """Run one forward pass over the latest token of every running row, and draw each row's next token."""
        lengths = self._cache.lengths
        ids = torch.tensor([[flight.ids[-1]] for flight in self._running])  # [rows, 1]
        # [rows, 1], without the padding
        positions = torch.tensor(
            [[length + flight.shift] for length, flight in zip(lengths, self._running, strict=True)]
        )
        self._cache.reserve(1)
        logits = self._forward(self._cache, ids, positions, new=[1] * len(lengths))
        self.stats.steps += 1
        self._draw(logits, first=0)

    @torch.inference_mode()
    def _forward(
        self,
        cache: BatchCache,
        ids: Tensor,
        positions: Tensor,
        *,
        new: list[int],
        pictures: dict[str, Any] | None = None,
    ) -> Tensor:
        """Return the logits at the last column, [rows, V]; ids and positions are left-padded, [rows, columns].

        Positions of a model with several kinds of them are [kinds, rows, columns].
        """
        inputs: dict[str, Any] = {
            "input_ids": ids.to(self._device),
            "attention_mask": cache.mask(new, pad_to=ids.shape[1]),
            self._cache_argument: cache,
            "use_cache": True,
            **(pictures or {}),
        }
        if "position_ids" in self._options:
            inputs["position_ids"] = positions.to(self._device)
        if "logits_to_keep" in self._options:  # a prompt needs only the last column's logits, not [rows, columns, V]
            inputs["logits_to_keep"] = 1
        logits = cast("Tensor", self._model(**inputs).logits)
        cache.advance(ids.shape[1])
        return self._allowed(logits[:, -1])

    def _allowed(self, logits: Tensor) -> Tensor:
        """Return the logits, [..., V], without the ids that stand for pictures: a model cannot read its own."""
        return logits.index_fill(-1, self._banned, -torch.inf) if len(self._banned) else logits

    @torch.inference_mode()
    def _draw(self, logits: Tensor, *, first: int) -> None:
        """Draw the next token for the rows from index `first` on, and remove the rows that this finishes."""
        flights = self._running[first:]
        draws = draw(
            logits,
            [flight.request.params for flight in flights],
            uniforms=[flight.uniforms.random() for flight in flights],
        )
        for flight, one in zip(flights, draws, strict=True):
            flight.accept(one, version=self.version)
        self.stats.generated_tokens += len(flights)
        self._finish([row for row in range(first, len(self._running)) if self._running[row].finish_reason])

    def _finish(self, rows: list[int]) -> None:
        """Report finished rows to their listeners, store them as prefixes for later turns, and remove them."""
        for row in rows:
            flight = self._running[row]
            length = self._cache.lengths[row]  # one less than its tokens: the last one was drawn but never an input
            self._prefixes.add(flight.identity()[:length], self._cache.row(row, tokens=length))
            if not flight.is_cancelled:
                flight.listener(flight.result())
        self._evict(rows)

    def _evict(self, rows: list[int]) -> None:
        if rows:
            self._is_blocked = False
        for row in reversed(rows):  # descending, because the last row takes the place of a removed one
            self._cache.remove(row)
            last = self._running.pop()
            if row < len(self._running):
                self._running[row] = last


_WORTH_WAITING = 32
"""A request waits one turn if another request is about to compute this many more tokens of their common prefix."""


@dataclass(slots=True)
class Admission:
    """A distinct prompt, and the sequences that start from it.

    Attributes:
        tokens: The prompt, and any tokens that were generated before a weight swap interrupted the sequence.
        identity: The tokens with numbers from the pictures in place of their placeholders.
        shared: Number of tokens in `prefix`.
        prefix: Keys and values of the first `shared` tokens; None without a stored prefix.
        flights: The sequences that join the batch; they share the computation of the prompt.
    """

    tokens: TokenArray
    identity: TokenArray
    shared: int
    prefix: KeyValues | None
    flights: list[Flight]

    @property
    def new(self) -> int:
        """Number of prompt tokens to compute, without the stored prefix."""
        return len(self.tokens) - self.shared

    @property
    def media(self) -> tuple[MediaSpan, ...]:
        """The spans of all pictures in the tokens."""
        return self.flights[0].request.media

    @property
    def pictures(self) -> list[tuple[MediaSpan, Blob]]:
        """The pictures in the tokens to compute."""
        request = self.flights[0].request
        both = zip(request.media, request.blobs, strict=True)
        return [(span, blob) for span, blob in both if span.offset >= self.shared]


def share_of(limit: int) -> int:
    """Return how many of the rows, or of the places in the queue, one attempt may have next to others."""
    return max(1, limit * 3 // 4)


def pick(
    waiting: deque[Flight],
    *,
    rows: int,
    taken: Counter[str],
    share: int,
    prefill_tokens: int,
    prefixes: PrefixStore,
) -> list[Admission]:
    """Take flights from the left of `waiting`, and return their distinct prompts.

    At most `rows` flights are taken. A flight stays if its attempt has `share` rows already, of which `taken` run; if
    its prompt shares a long prefix with a prompt already taken; or if the prompts, padded to the longest one, would
    exceed `prefill_tokens`. The first prompt is taken whatever its length. Flights that stay keep their order at the
    left of `waiting`.
    """
    picked: dict[bytes, Admission] = {}
    kept: list[Flight] = []
    width = 0
    while waiting and rows > 0:
        flight = waiting.popleft()
        attempt = flight.request.attempt
        if attempt and taken[attempt] >= share:
            kept.append(flight)
            continue
        identity = flight.identity()
        admission = picked.get(identity.tobytes()) or _admission(flight, identity, picked, prefixes)
        if admission is None:
            kept.append(flight)
            continue
        width = max(width, admission.new)
        # Another flight of a prompt that was already picked costs nothing.
        if picked and not admission.flights and (len(picked) + 1) * width > prefill_tokens:
            kept.append(flight)
            break
        picked[identity.tobytes()] = admission
        admission.flights.append(flight)
        flight.cached_tokens = admission.shared
        taken[attempt] += 1
        rows -= 1
    waiting.extendleft(reversed(kept))
    return list(picked.values())


def _admission(
    flight: Flight, identity: TokenArray, picked: dict[bytes, Admission], prefixes: PrefixStore
) -> Admission | None:
    """Return the admission of a prompt not yet picked in this turn; None if a picked prompt will compute its prefix."""
    shared, prefix = prefixes.find(identity)
    # A picture is computed as a whole, so a prefix that ends inside one ends before it.
    cut = next((s.offset for s in flight.request.media if s.offset < shared < s.offset + s.length), shared)
    if prefix is not None and cut < shared:
        shared, prefix = cut, [tensor[:, :, :cut] for tensor in prefix] if cut else None
    probe = shared + _WORTH_WAITING
    if prefixes.is_on and len(identity) > probe:
        start = identity[:probe].tobytes()
        if any(key.startswith(start) for key in picked):
            return None
    return Admission(flight.tokens(), identity, shared, prefix, [])


def padded(admissions: Sequence[Admission], width: int) -> tuple[Tensor, Tensor]:
    """Return ids and positions of each prompt's tokens to compute, both [rows, width], padded with 0 on the left."""
    ids = torch.zeros((len(admissions), width), dtype=torch.long)
    positions = torch.zeros_like(ids)
    for row, admission in enumerate(admissions):
        ids[row, width - admission.new :] = torch.tensor(admission.tokens[admission.shared :])
        positions[row, width - admission.new :] = torch.arange(admission.shared, len(admission.tokens))
    return ids, positions


def with_pictures(positions: Tensor, admissions: Sequence[Admission], modality: Modality) -> Tensor:
    """Return the positions of prompts with pictures, [kinds, rows, columns] if the model has several kinds of them.

    Takes the plain positions of `padded`, and sets by how much the flights' later positions differ from plain ones.
    """
    every = [modality.positions(admission.tokens.tolist(), admission.media) for admission in admissions]
    if every[0] is None:
        return positions
    found = positions.repeat(len(every[0]), 1, 1)
    for row, (admission, own) in enumerate(zip(admissions, every, strict=True)):
        found[:, row, positions.shape[1] - admission.new :] = own[:, admission.shared :]
        for flight in admission.flights:
            flight.shift = int(own.max()) + 1 - len(admission.tokens)
    return found
