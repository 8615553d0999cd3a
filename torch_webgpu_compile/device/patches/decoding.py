"""`transformers`: ``generate`` submits many tokens together where nobody looks at each.

Patched: when it is imported, ``GenerationMixin._sample`` in ``transformers.generation.utils``.
Tried with transformers 5.24; where a version's has other parameters, nothing is changed.

Why: between two tokens ``generate`` prepares a model's inputs in Python, Dynamo compares a hundred
weights with those of the call before, and eight eager operators append the token and ask whether
it was the last: 1 to 2 ms of the host's, in which a GPU has made one or two tokens. Processors that
read all tokens get a new size with each, for which their plan is made ready anew. With a static
cache, of models of transformers, a step is compiled that leaves the token where the next step
reads it, and among all tokens, in memory for as many as there may be; so steps follow each other
without Python's part. The host learns what they chose while later ones run, and throws away what
follows the end.

Until: ``generate`` does the same itself.
"""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...tensors import devices, generators
from ...tensors.copying import start_to_host
from ..import_hooks import around
from . import sampling as choices
from .generation import OF_SAMPLE, is_usual, is_within, leaves_masks_to_model, sampling_of, takes

if TYPE_CHECKING:
    from ...capture.graph.wrappers import GraphCall

MOST_STEPS = 8
"""Steps that are submitted together. The first ones are fewer, so that no more is thrown away after
the end than was wanted, and so are those of a slow GPU, from which tokens come one by one."""

_SECONDS = 0.05
"""What steps that are submitted together take at most, where one does not take longer."""

_KEYWORDS = {"cache", "position_ids", "use_cache", "logits_to_keep"}

_READERS = frozenset(("RepetitionPenaltyLogitsProcessor",))
_PROCESSORS = _READERS | {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "LogitNormalization",
    "InfNanRemoveLogitsProcessor",
}
"""Those to which it is the same how often, and where, a token is among the ones so far: for readers
of tokens, these are in memory that a prompt's first token fills."""


@dataclass(frozen=True)
class Wanted:
    """What a call of ``_sample`` asks for.

    Attributes:
        processors: of scores.
        count: tokens at most.
        ends: the tokens after which a sequence is finished.
        padding: what a finished one is continued with; None if none ends.
    """

    model: Any
    input_ids: Tensor
    config: Any
    keywords: dict[str, Any]
    processors: tuple[Any, ...]
    count: int
    ends: tuple[int, ...]
    padding: Tensor | None
    streamer: Any


@around("transformers.generation.utils:GenerationMixin._sample")
def sample(original: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
    wanted = wanted_of(inspect.unwrap(original), OF_SAMPLE, self, arguments, keywords)
    if wanted is None:
        return original(self, *arguments, **keywords)
    with sampling_of(self, keywords):
        return _decode(wanted)


def wanted_of(
    original: Any,
    parameters: str,
    model: Any,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> Wanted | None:
    """What is asked of a method with these parameters.

    None if it is not known to be the same when it is submitted together.
    """
    if len(arguments) != 1 or not takes(original, parameters) or model.device.type != devices.NAME:
        return None
    own = set(parameters.split())
    of_model = {k: v for k, v in keywords.items() if k not in own and v is not None}
    config, processors = keywords["generation_config"], tuple(keywords["logits_processor"])
    limits = _limits(keywords["stopping_criteria"], arguments[0])
    if (
        limits is None
        or not all(map(_takes_tokens_in_any_order, processors))
        or keywords.get("synced_gpus")
        or not _is_for_tokens(config)
        or not of_model.keys() <= _KEYWORDS
        or not of_model.get("use_cache")
        or not is_plain(model)
        or not leaves_masks_to_model(model, of_model.get("cache"))
        or not model._valid_auto_compile_criteria(of_model, config)
    ):
        return None
    count, ends = limits
    padding = config._pad_token_tensor if ends else None
    if count < 2 or (ends and padding is None):
        return None
    streamer = keywords.get("streamer")
    return Wanted(model, arguments[0], config, of_model, processors, count, ends, padding, streamer)


def _is_for_tokens(config: Any) -> bool:
    """Whether nothing but tokens is wanted, in the usual way."""
    others = (
        "is_assistant compile_config prefill_chunk_size output_scores output_logits "
        "output_attentions output_hidden_states"
    )
    return not any(getattr(config, name, None) for name in others.split())


def _takes_tokens_in_any_order(processor: Any) -> bool:
    kind = type(processor)
    is_known = kind.__module__ == "transformers.generation.logits_process"
    ignored = getattr(processor, "prompt_ignore_length", None)
    return is_known and kind.__name__ in _PROCESSORS and ignored is None


def is_plain(model: Any) -> bool:
    """Whether a model's forward does nothing but compute: no hook, nothing that a user wrote."""
    if not type(model).__module__.startswith("transformers.models.") or not is_usual(model):
        return False
    if model.config.is_encoder_decoder or model.training:
        return False
    return not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def _limits(criteria: Any, input_ids: Tensor) -> tuple[int, tuple[int, ...]] | None:
    """The most tokens, and those after which a sequence is finished; None if there is more."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    most: int | None = None
    ends: list[int] = []
    for part in criteria:
        if type(part) is MaxLengthCriteria and is_within(part, part.max_length):
            most = int(part.max_length) if most is None else min(most, int(part.max_length))
        elif type(part) is EosTokenCriteria:
            ends += part.eos_token_id.tolist()
        else:
            return None
    return None if most is None else (most - input_ids.shape[1], tuple(ends))


# ---- what is compiled


@dataclass(frozen=True)
class _Ends:
    """What steps know of sequences that end.

    Attributes:
        unfinished: which go on, ``[batch]``.
        tokens: that end one.
        padding: what one that is finished goes on with.
    """

    unfinished: Tensor
    tokens: Tensor
    padding: Tensor


@dataclass(frozen=True)
class _State:
    """What steps read and leave on the device.

    Attributes:
        made: the last tokens, ``[batch, MOST_STEPS]``, each in the column of its number modulo
            that of columns.
        column: of the last one, ``[1]``.
        position: the last one's.
        tokens: all, ``[batch, most]``, if processors are to have them.
        count: how many of these there are, ``[1]``.
        ends: None if no sequence ends.
    """

    made: Tensor
    column: Tensor
    position: Tensor
    tokens: Tensor | None
    count: Tensor
    ends: _Ends | None


def _scores(model: Any, others: dict[str, Any], state: _State) -> Tensor:
    """Scores of what follows the last token, ``[batch, vocabulary]``."""
    token = state.made.index_select(1, state.column)
    outputs = model(input_ids=token, position_ids=state.position, **others, return_dict=True)
    state.position.add_(1)
    return last_scores(outputs)


def last_scores(outputs: Any) -> Tensor:
    """Those from which ``_sample`` chooses."""
    scores: Tensor = outputs.logits[:, -1].to(torch.float32)
    return scores


def _greedy_step(model: Any, others: dict[str, Any], state: _State) -> None:
    """Appends the token with the greatest score."""
    _append(torch.argmax(_scores(model, others, state), dim=-1), state)


def _choose(processors: Sequence[Any], kind: Any, scores: Tensor, state: _State) -> None:
    """Appends a token that `sampling` chooses."""
    tokens = state.made if state.tokens is None else state.tokens
    _append(kind(processors, tokens, scores).flatten(), state)


def _append(chosen: Tensor, state: _State) -> None:
    """Puts tokens behind the last ones, padding where a sequence is finished; notes which are."""
    if state.ends is not None:
        chosen = torch.where(state.ends.unfinished, chosen, state.ends.padding)
        state.ends.unfinished.logical_and_(~torch.isin(chosen, state.ends.tokens))
    following = (state.column + 1) % MOST_STEPS
    state.made.index_copy_(1, following, chosen[:, None])
    state.column.copy_(following)
    if state.tokens is not None:
        state.tokens.index_copy_(1, state.count, chosen[:, None])
        state.count.add_(1)


class _Compiled:
    """A function that is compiled, as one graph if that is possible.

    Args:
        of: see `sampling.named`.

    Attributes:
        is_whole: a call is one graph, and nothing besides.
    """

    def __init__(self, function: Callable[..., Any], *of: type) -> None:
        self._own = choices.named(function, *of)
        self._run = torch.compile(self._own, backend=devices.NAME, fullgraph=True)
        self.is_whole = True

    def __call__(self, *arguments: Any) -> Any:
        from ...torch_private import FailOnRecompileLimitHit, Unsupported  # loads Dynamo

        if not self.is_whole:
            return self._run(*arguments)
        try:
            return self._run(*arguments)
        except (Unsupported, FailOnRecompileLimitHit):  # nothing has run
            self._run = torch.compile(self._own, backend=devices.NAME)
            self.is_whole = False
            return self._run(*arguments)


_of_models: weakref.WeakKeyDictionary[Any, dict[Callable[..., Any], _Compiled]] = (
    weakref.WeakKeyDictionary()
)


def compiled(function: Callable[..., Any], model: Any) -> _Compiled:
    """A function that is compiled for a model."""
    known = _of_models.setdefault(model, {})
    if function not in known:
        known[function] = _Compiled(function, type(model))
    return known[function]


@functools.cache
def _compiled_choice(*processors: type) -> _Compiled:
    return _Compiled(_choose, *processors)


# ---- steps


@dataclass(frozen=True)
class _Again:
    """A call of a graph that steps make.

    Attributes:
        arguments: those that are the same in each step.
        given: (position among the arguments, number of an earlier call of the step, position among
            its results) of the others.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    given: tuple[tuple[int, int, int], ...]


def _again(before: Sequence[GraphCall], after: Sequence[GraphCall]) -> list[_Again] | None:
    """The calls of each step, if those of two steps show them."""
    if not before or [call for call, *_ in before] != [call for call, *_ in after]:
        return None
    found = []
    for number, ((call, first, _), (_, second, _)) in enumerate(zip(before, after, strict=True)):
        given = []
        for position, (a, b) in enumerate(zip(first, second, strict=True)):
            if _is_same(a, b):
                continue
            place = _place(a, before[:number])
            if place is None or place != _place(b, after[:number]):
                return None
            given.append((position, *place))
        found.append(_Again(call, second, tuple(given)))
    return found


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (int, float)) and a == b)


def _place(value: Any, calls: Sequence[GraphCall]) -> tuple[int, int] | None:
    for number, (_, _, results) in enumerate(calls):
        for position, result in enumerate(results):
            if result is value:
                return number, position
    return None


class Steps:
    """The steps of one call of ``generate``.

    Args:
        functions: what a step calls, in this order.
        step: makes one.
    """

    def __init__(self, functions: Sequence[_Compiled], step: Callable[[], None]) -> None:
        self._functions, self._step = functions, step
        self._before: list[GraphCall] = []
        self._known: list[_Again] | None = None

    def run(self, count: int) -> None:
        """Submits so many."""
        from ...capture.graph.wrappers import noted_calls, repeat  # loads Dynamo

        while count and self._known is None:
            with noted_calls() as calls:
                self._step()
            are_all = all(f.is_whole for f in self._functions)
            if are_all and len(calls) == len(self._functions):
                self._known = _again(self._before, calls)
            self._before = calls if self._known is None else []
            count -= 1
        if self._known is None:
            return
        if len(self._known) == 1:
            repeat(self._known[0].call, self._known[0].arguments, count)
            return
        for _ in range(count):
            self._repeat(self._known)

    def _repeat(self, known: Sequence[_Again]) -> None:
        results: list[Sequence[Any]] = []
        for again in known:
            arguments = again.arguments
            if again.given:
                own = list(arguments)
                for position, number, place in again.given:
                    own[position] = results[number][place]
                arguments = tuple(own)
            results.append(again.call(*arguments))


# ---- a call of `generate`


def _decode(wanted: Wanted) -> Any:
    """What ``_sample`` returns: the prompts with the tokens that follow them."""
    outputs, given, settle = prefilled(wanted)
    state = _state(wanted, given.pop("position_ids"))
    steps = _steps(wanted, given, state, last_scores(outputs))
    del outputs
    answer = _Answer(wanted)
    try:
        with wanted.model._optimize_model_for_decode():
            _follow(answer, state, steps)
    finally:
        settle(answer.count)
    answer.finish()
    ids = wanted.input_ids
    return answer_of(wanted, torch.cat([ids, answer.tokens().to(ids.device)], dim=-1))


def prefilled(wanted: Wanted) -> tuple[Any, dict[str, Any], Callable[[int], None]]:
    """Reads the prompts.

    Returns:
        What the model makes of them; what a step is given besides a token; and what is to be called
        with the number of tokens that follow: then the cache, if somebody has it, holds what is
        before the last one.
    """
    model, ids, cache = wanted.model, wanted.input_ids, wanted.keywords["cache"]
    outputs = model._prefill(ids, wanted.config, wanted.keywords, is_first_iteration=True)
    is_kept = wanted.config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    lengths = [layer.cumulative_length.clone() for layer in cache.layers] if is_kept else []
    keywords = model._update_model_kwargs_for_generation(outputs, wanted.keywords)
    # Of the step after the first token, whichever that is.
    given = model.prepare_inputs_for_generation(
        torch.cat([ids, ids[:, -1:]], dim=-1), next_sequence_length=1, **keywords
    )
    del given["input_ids"]

    def settle(count: int) -> None:
        for layer, length in zip(cache.layers, lengths, strict=False):
            layer.cumulative_length.copy_(length + (count - 1))

    return outputs, given, settle


def answer_of(wanted: Wanted, sequences: Any) -> Any:
    """What ``generate`` is to return."""
    if not wanted.config.return_dict_in_generate:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences, cache=wanted.keywords["cache"])


def _follow(answer: _Answer, state: _State, steps: Steps) -> None:
    """Makes steps until the answer is over; the last ones are made while others arrive."""
    while not answer.is_over and (count := answer.next_count()):
        arrive = start_to_host([state.made])
        for part in answer.parts(count):
            steps.run(part)
        answer.take(arrive, count)
    answer.take(start_to_host([state.made]), 0)


def _state(wanted: Wanted, position: Tensor) -> _State:
    """Before the first token."""
    ids = wanted.input_ids
    batch, length = ids.shape
    here: Any = {"device": ids.device, "dtype": ids.dtype}
    tokens = ends = None
    if any(type(processor).__name__ in _READERS for processor in wanted.processors):
        tokens = torch.cat([ids, ids[:, :1].expand(batch, wanted.count)], dim=-1)
        torch._dynamo.maybe_mark_dynamic(tokens, 1)
    if wanted.padding is not None:
        unfinished = torch.ones(batch, device=ids.device, dtype=torch.bool)
        ends = _Ends(unfinished, torch.tensor(wanted.ends, **here), wanted.padding.to(**here))
    made = torch.zeros(batch, MOST_STEPS, **here)
    column, count = torch.full((1,), -1, **here), torch.full((1,), length, **here)
    return _State(made, column, position.clone(), tokens, count, ends)


def _steps(wanted: Wanted, others: dict[str, Any], state: _State, scores: Tensor) -> Steps:
    """Those that follow the first token, which is chosen here from ``scores``."""
    model = wanted.model
    if not (wanted.processors or wanted.config.do_sample):
        _append(torch.argmax(scores, dim=-1), state)
        step = compiled(_greedy_step, model)
        return Steps([step], functools.partial(step, model, others, state))
    kind = choices.draw if wanted.config.do_sample else choices.take_greatest
    score = compiled(_scores, model)
    choose = _compiled_choice(*map(type, wanted.processors))
    given = wanted.processors, kind
    choose(*given, scores, state)
    return Steps([score, choose], lambda: choose(*given, score(model, others, state), state))


class Pace:
    """How many steps are to be submitted together.

    Attributes:
        together: so many.
    """

    def __init__(self) -> None:
        self.together, self._last = 1, time.perf_counter()

    def note(self) -> None:
        """Those of before have arrived."""
        now = time.perf_counter()
        is_slow, self._last = now - self._last > _SECONDS, now
        together = max(1, self.together // 2) if is_slow else 2 * self.together
        self.together = min(together, MOST_STEPS)


class _Answer:
    """What has been chosen, as the host learns of it.

    Attributes:
        count: tokens that the host knows.
        is_over: all sequences are finished.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.is_over = False
        self._known: list[Tensor] = []
        self._most, self._asked, self._arriving = wanted.count, 1, 1
        self._pace = Pace()
        self._ends = torch.tensor(wanted.ends, dtype=torch.int64)
        self._unfinished = torch.ones(len(wanted.input_ids), dtype=torch.bool)
        self._streamer = wanted.streamer
        self._index = wanted.input_ids.get_device()
        # The generator's after each token, if tokens may be thrown away that have drawn from it.
        self._states: list[Tensor] | None = None
        if wanted.config.do_sample and wanted.ends:
            self._states = [generators.get_rng_state(self._index)]

    @property
    def count(self) -> int:
        """See the class."""
        return len(self._known)

    def next_count(self) -> int:
        """The steps to submit next, 0 if there are enough."""
        return min(self._pace.together, self._most - self._asked)

    def parts(self, count: int) -> Iterator[int]:
        """The numbers of steps to make at once."""
        if self._states is None:
            yield count
            return
        for _ in range(count):
            yield 1
            self._states.append(generators.get_rng_state(self._index))

    def take(self, arrive: Callable[[], list[Tensor]], submitted: int) -> None:
        """Waits for tokens that were on their way, while ``submitted`` more are made."""
        (made,) = arrive()
        arrived = range(self._asked - self._arriving, self._asked)
        self._asked += submitted
        self._arriving = submitted
        for number in arrived:
            if self.is_over:
                break
            token = made[:, number % MOST_STEPS].clone()
            self._known.append(token)
            if self._streamer is not None:
                self._streamer.put(token)
            self._unfinished &= ~torch.isin(token, self._ends)
            self.is_over = not self._unfinished.any()
        self._pace.note()

    def finish(self) -> None:
        """Draws of tokens that were thrown away leave no trace, if nobody has drawn since."""
        if self._states is not None:
            last = self._states[-1]
            if last.equal(generators.get_rng_state(self._index)):
                generators.set_rng_state(self._states[self.count - 1], self._index)
        if self._streamer is not None:
            self._streamer.end()

    def tokens(self) -> Tensor:
        """All, on the host."""
        return torch.stack(self._known, dim=1)
