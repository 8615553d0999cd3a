"""`transformers`: ``generate`` submits many tokens together where nobody looks at each.

Patched: when it is imported, ``GenerationMixin._sample`` in ``transformers.generation.utils``.
Tried with transformers 5.24; where a version's has other parameters, nothing is changed.

Why: between two tokens ``generate`` prepares a model's inputs in Python, Dynamo compares a hundred
weights with those of the call before, and eight eager operators append the token and ask whether
it was the last: 1 to 2 ms of the host's, in which a GPU has made one or two tokens. With a static
cache, of greedy calls of models of transformers, a step is compiled that leaves the token where the
next step reads it, so that steps follow each other without the host. It learns what they chose
while later ones run, and throws away what follows the end.

Until: ``generate`` does the same itself.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ...tensors import devices
from ...tensors.copying import start_to_host
from ..import_hooks import around
from .generation import OF_SAMPLE, is_usual, is_within, leaves_masks_to_model, sampling, takes

_MOST_STEPS = 8
"""Steps that are submitted together. A number of the first ones fits into each such number, so
that what is thrown away after the end is never more than was wanted."""

_KEYWORDS = {"cache", "position_ids", "use_cache", "logits_to_keep"}


@dataclass(frozen=True)
class _Wanted:
    """What a call of ``_sample`` asks for.

    Attributes:
        count: tokens at most.
        ends: the tokens after which a sequence is finished.
        padding: what a finished one is continued with; None if none ends.
    """

    model: Any
    input_ids: Tensor
    config: Any
    keywords: dict[str, Any]
    count: int
    ends: tuple[int, ...]
    padding: Tensor | None
    streamer: Any


@around("transformers.generation.utils:GenerationMixin._sample")
def sample(original: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
    wanted = _wanted(inspect.unwrap(original), self, arguments, keywords)
    if wanted is None:
        return original(self, *arguments, **keywords)
    with sampling(self, keywords):
        return _decode(wanted)


def _wanted(
    original: Any, model: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> _Wanted | None:
    """What is asked for; None if it is not known to be the same when it is submitted together."""
    if len(arguments) != 1 or not takes(original, OF_SAMPLE) or model.device.type != devices.NAME:
        return None
    own = set(OF_SAMPLE.split())
    of_model = {k: v for k, v in keywords.items() if k not in own and v is not None}
    config, streamer = keywords["generation_config"], keywords.get("streamer")
    limits = _limits(keywords["stopping_criteria"], arguments[0])
    if (
        limits is None
        or keywords["logits_processor"]
        or keywords.get("synced_gpus")
        or not (streamer is None or type(streamer).__module__.startswith("transformers."))
        or not _is_greedy(config)
        or not of_model.keys() <= _KEYWORDS
        or not of_model.get("use_cache")
        or not _is_plain(model)
        or not leaves_masks_to_model(model, of_model.get("cache"))
        or not model._valid_auto_compile_criteria(of_model, config)
    ):
        return None
    count, ends = limits
    padding = config._pad_token_tensor if ends else None
    if count < 2 or (ends and padding is None):
        return None
    return _Wanted(model, arguments[0], config, of_model, count, ends, padding, streamer)


def _is_greedy(config: Any) -> bool:
    """Whether nothing but the greatest scores' tokens is wanted."""
    others = "do_sample is_assistant return_dict_in_generate compile_config prefill_chunk_size"
    return not any(getattr(config, name, None) for name in others.split())


def _is_plain(model: Any) -> bool:
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


# ---- steps


@dataclass(frozen=True)
class _State:
    """What steps read and leave on the device.

    Attributes:
        made: the last tokens, ``[batch, _MOST_STEPS]``, each in the column of its number modulo
            that of columns.
        column: of the last one, ``[1]``.
        position: the last one's.
        unfinished: which sequences go on, ``[batch]``.
        ends: see `_Wanted`.
        padding: see `_Wanted`.
    """

    made: Tensor
    column: Tensor
    position: Tensor
    unfinished: Tensor | None
    ends: Tensor | None
    padding: Tensor | None


def _step(model: Any, others: dict[str, Any], state: _State) -> None:
    """Appends the greedy choice after a token."""
    token = state.made.index_select(1, state.column)
    outputs = model(input_ids=token, position_ids=state.position, **others, return_dict=True)
    chosen = torch.argmax(outputs.logits[:, -1].to(torch.float32), dim=-1)
    following = (state.column + 1) % _MOST_STEPS
    state.made.index_copy_(1, following, _kept(chosen, state)[:, None])
    state.column.copy_(following)
    state.position.add_(1)


def _kept(chosen: Tensor, state: _State) -> Tensor:
    """The tokens, padding where a sequence is finished; notes which are."""
    if state.unfinished is None or state.ends is None or state.padding is None:
        return chosen
    chosen = torch.where(state.unfinished, chosen, state.padding)
    state.unfinished.logical_and_(~torch.isin(chosen, state.ends))
    return chosen


_calls: ContextVar[list[tuple[Callable[..., Any], tuple[Any, ...]]] | None] = ContextVar(
    "calls", default=None
)


def _noting(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend, with calls of its graphs noted in `_calls`."""
    from ...backend import webgpu  # the compiler, which takes a second

    call = webgpu(module, list(inputs))

    def noted(*arguments: Any) -> Any:
        calls = _calls.get()
        if calls is not None:
            calls.append((call, arguments))
        return call(*arguments)

    return noted


_compiled: weakref.WeakKeyDictionary[Any, Callable[..., None]] = weakref.WeakKeyDictionary()


def _compiled_step(model: Any) -> Callable[..., None]:
    found = _compiled.get(model)
    if found is None:
        # Dynamo keeps and bounds what it has compiled by the code object: each model has its own.
        own = FunctionType(_step.__code__.replace(), _step.__globals__, _step.__name__)
        found = _compiled[model] = torch.compile(own, backend=_noting)
    return found


class _Steps:
    """The steps of one call of ``generate``."""

    def __init__(self, model: Any, others: dict[str, Any], state: _State) -> None:
        self._arguments = model, others, state
        self._compiled = _compiled_step(model)
        self._known: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self._is_same = False  # a call was as the one before

    def run(self, count: int) -> None:
        """Submits so many."""
        from ...capture.graph.wrappers import repeat

        while count and not self._is_same:
            calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
            token = _calls.set(calls)
            try:
                self._compiled(*self._arguments)
            finally:
                _calls.reset(token)
            count -= 1
            if len(calls) == 1:
                before, self._known = self._known, calls[0]
                self._is_same = before is not None and _are_same(before, self._known)
        if count and self._known is not None:
            repeat(*self._known, count)


def _are_same(before: Any, after: Any) -> bool:
    """Whether two calls are one of the same graph with the same arguments."""
    call, arguments = before
    return call is after[0] and all(map(_is_same, arguments, after[1]))


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (int, float)) and a == b)


# ---- a call


def _decode(wanted: _Wanted) -> Tensor:
    """The prompts with the tokens that follow them, as ``_sample`` returns them."""
    model, ids, streamer = wanted.model, wanted.input_ids, wanted.streamer
    outputs = model._prefill(ids, wanted.config, wanted.keywords, is_first_iteration=True)
    keywords = model._update_model_kwargs_for_generation(outputs, wanted.keywords)
    first = torch.argmax(outputs.logits[:, -1].to(torch.float32), dim=-1)
    del outputs
    given = model.prepare_inputs_for_generation(
        torch.cat([ids, first[:, None]], dim=-1), next_sequence_length=1, **keywords
    )
    answer = _Answer(len(ids), wanted)
    del given["input_ids"]
    state = _state(wanted, first, given.pop("position_ids"))
    with model._optimize_model_for_decode():
        steps = _Steps(model, given, state)
        arrive = start_to_host([state.made])
        while answer.asked < wanted.count and not answer.is_over:
            count = min(answer.asked, _MOST_STEPS, wanted.count - answer.asked)
            steps.run(count)
            answer.take(arrive, count)
            arrive = start_to_host([state.made])
        answer.take(arrive, 0)
    if streamer is not None:
        streamer.end()
    return torch.cat([ids, answer.tokens().to(ids.device)], dim=-1)


def _state(wanted: _Wanted, first: Tensor, position: Tensor) -> _State:
    here: Any = {"device": first.device, "dtype": first.dtype}
    made = torch.zeros(len(first), _MOST_STEPS, **here)
    made[:, 0] = first
    unfinished = ends = None
    if wanted.ends:
        ends = torch.tensor(wanted.ends, **here)
        unfinished = ~torch.isin(first, ends)
    padding = None if wanted.padding is None else wanted.padding.to(**here)
    column = torch.zeros(1, **here)
    return _State(made, column, position.clone(), unfinished, ends, padding)


class _Answer:
    """What has been chosen, as the host learns of it.

    Attributes:
        asked: tokens that have been submitted.
        is_over: all sequences are finished.
    """

    def __init__(self, batch: int, wanted: _Wanted) -> None:
        self.asked, self.is_over = 1, False
        self._known: list[Tensor] = []
        self._arriving = 1
        self._ends = torch.tensor(wanted.ends, dtype=torch.int64)
        self._unfinished = torch.ones(batch, dtype=torch.bool)
        self._streamer = wanted.streamer

    def take(self, arrive: Callable[[], list[Tensor]], submitted: int) -> None:
        """Waits for tokens that were on their way, while ``submitted`` more are made."""
        (made,) = arrive()
        start = self.asked - self._arriving
        for number in range(start, self.asked):
            if self.is_over:
                break
            token = made[:, number % _MOST_STEPS].clone()
            self._known.append(token)
            if self._streamer is not None:
                self._streamer.put(token)
            self._unfinished &= ~torch.isin(token, self._ends)
            self.is_over = not self._unfinished.any()
        self.asked += submitted
        self._arriving = submitted

    def tokens(self) -> Tensor:
        """All, on the host."""
        return torch.stack(self._known, dim=1)
