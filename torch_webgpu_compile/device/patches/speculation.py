"""`transformers`: tokens that are proposed are made, checked and taken on the GPU.

Patched: when it is imported, ``GenerationMixin._assisted_decoding`` in
``transformers.generation.utils``. Tried with transformers 5.24; where a version's has other
parameters, nothing is changed.

Why: ``generate(…, prompt_lookup_num_tokens=10)`` and ``generate(…, assistant_model=draft)`` read on
the host, several times for each turn, what is proposed and how much of it is right; each turn has
another number of tokens, for which a step is compiled anew; and a draft is a call of ``generate``.
With a static cache both write behind its end in the last turns, and fail. Here a turn with greedy
choices is a compiled step for a window of always as many tokens: it looks up what followed the last
tokens when they came before, or reads what steps of the draft have left, checks that, and leaves
what was right where the next one reads it. Turns are submitted together as steps of `decoding` are.

Until: ``generate`` does the same itself.
"""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...tensors.copying import start_to_host
from ..import_hooks import around
from .decoding import (
    MOST_STEPS,
    Pace,
    Steps,
    Wanted,
    answer_of,
    compiled,
    is_plain,
    last_scores,
    prefilled,
    wanted_of,
)
from .generation import OF_SAMPLE, leaves_masks_to_model, sampling_of

_OF_ASSISTED = OF_SAMPLE.replace(
    "streamer", "streamer inputs_tensor assistant_model assistant_tokenizer tokenizer"
)
_OTHER_KINDS = "assistant_early_exit use_mtp speculation_type assistant_ensemble_weight"

_MOST_DRAFTED = 5
"""Tokens of a draft in a turn. `generate` takes up to 20, as far as the draft is sure, for which
the host would have to wait; the sixth is rarely right, and each is a step of the draft."""


@around("transformers.generation.utils:GenerationMixin._assisted_decoding")
def assist(original: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
    wanted = wanted_of(inspect.unwrap(original), _OF_ASSISTED, self, arguments, keywords)
    draft = keywords.get("assistant_model")
    if wanted is None or not (count := _proposed(wanted, draft, keywords)):
        return original(self, *arguments, **keywords)
    with sampling_of(self, keywords):
        return _decode(wanted, count + 1, draft)


def _proposed(wanted: Wanted, draft: Any, keywords: dict[str, Any]) -> int:
    """The tokens of a turn that are proposed, 0 if it is not known how."""
    config = wanted.config
    if (
        wanted.processors
        or config.do_sample
        or len(wanted.input_ids) != 1
        or any(getattr(config, name, None) for name in _OTHER_KINDS.split())
        or keywords.get("assistant_tokenizer") is not None
    ):
        return 0
    count = config.prompt_lookup_num_tokens or 0
    if not count and draft is not None and _can_draft(draft, wanted):
        asked = draft.generation_config.num_assistant_tokens
        count = min(asked or _MOST_DRAFTED, _MOST_DRAFTED)
    return count if count < _room(wanted.keywords["cache"]) else 0


def _can_draft(draft: Any, wanted: Wanted) -> bool:
    """Whether a step of this model can be compiled, and its tokens are those of the other one."""
    words = [model.config.get_text_config().vocab_size for model in (draft, wanted.model)]
    return (
        draft.device == wanted.model.device
        and words[0] == words[1]
        and is_plain(draft)
        and leaves_masks_to_model(draft, _cache_like(draft, wanted))
    )


def _cache_like(draft: Any, wanted: Wanted) -> Any:
    """A cache of a draft for as many tokens."""
    from transformers import StaticCache

    return StaticCache(config=draft.config, max_cache_len=_room(wanted.keywords["cache"]))


def _room(cache: Any) -> int:
    """The tokens that a static cache has positions for."""
    return min(int(layer.max_cache_len) for layer in cache.layers)


# ---- what is compiled


@dataclass(frozen=True)
class _State:
    """What turns read and leave on the device.

    Attributes:
        tokens: all, ``[room]``, with more behind them that mean nothing.
        length: how many there are, ``[1]``.
        most: how many there may be, ``[1]``.
        unfinished: whether it goes on, ``[1]``.
        ends: the tokens after which it does not; none for None.
        made: what turns appended, ``[MOST_STEPS, width]``, each turn in the row of its number
            modulo that of rows.
        counts: how many tokens of each row it appended, ``[MOST_STEPS]``.
        row: of the next turn, ``[1]``.
    """

    tokens: Tensor
    length: Tensor
    most: Tensor
    unfinished: Tensor
    ends: Tensor | None
    made: Tensor
    counts: Tensor
    row: Tensor


def _look_up(model: Any, others: dict[str, Any], state: _State, longest: int) -> None:
    """A turn with what followed the last tokens when they came before."""
    window = _window(others, state)
    source = _continuation(state.tokens, state.length, longest) + (window - state.length)
    found = state.tokens[source.clamp(min=0, max=len(state.tokens) - 1)]
    given = torch.where(window < state.length, state.tokens[window], found)
    _take(model, others, state, window, given, source < state.length)


def _take_drafted(model: Any, others: dict[str, Any], state: _State, cursor: Tensor) -> None:
    """A turn with what a draft has left behind the known tokens."""
    window = _window(others, state)
    given = state.tokens[window]
    _take(model, others, state, window, given, torch.ones_like(given, dtype=torch.bool))
    cursor.copy_(state.length - 1)


def _draft(model: Any, others: dict[str, Any], state: _State, cursor: Tensor) -> None:
    """Leaves behind the token at the ``cursor`` what the draft takes for the next, and goes on.

    What is behind the end of its cache is not read by anybody.
    """
    tokens, cache = state.tokens, others["cache"]
    position = cursor.clamp(max=_room(cache) - 1)
    _set_lengths(cache, position)
    ids, positions = tokens[position][None], position[None]
    outputs = model(input_ids=ids, position_ids=positions, **others, return_dict=True)
    after = position + 1
    chosen = torch.where(after < state.length, tokens[after], outputs.logits[0, -1:].argmax(-1))
    tokens.index_copy_(0, after, chosen)
    cursor.add_(1)


def _set_lengths(cache: Any, length: Tensor) -> None:
    for layer in cache.layers:
        layer.cumulative_length.copy_(length.squeeze(0))


def _window(others: dict[str, Any], state: _State) -> Tensor:
    """The positions of the tokens that the model is given.

    It ends with those that are proposed, and begins with the last known one, or earlier at the end
    of the cache, where known ones are computed again.
    """
    width = state.made.shape[1]
    room = _room(others["cache"])
    numbers = torch.arange(width, device=state.tokens.device)
    return (state.length - 1).clamp(max=room - width) + numbers


def _take(
    model: Any,
    others: dict[str, Any],
    state: _State,
    window: Tensor,
    given: Tensor,
    is_proposed: Tensor,
) -> None:
    """Appends the tokens that were proposed rightly, and the one that follows them.

    Args:
        given: the tokens of the window.
        is_proposed: which of those that are not known yet are to be tried.
    """
    tokens, length = state.tokens, state.length
    width, room = len(window), len(tokens)
    _set_lengths(others["cache"], window[:1])
    outputs = model(input_ids=given[None], position_ids=window[None], **others, return_dict=True)
    chosen = outputs.logits[0].argmax(dim=-1)
    after = window + 1
    is_right = (window < length) | (is_proposed & (given == chosen.roll(1)))
    following = torch.where(is_right, room, window).amin(dim=0, keepdim=True) + 1
    following = following.minimum(after[-1:] + 1).minimum(state.most)
    if state.ends is not None:
        is_end = torch.isin(chosen, state.ends) & (after >= length)
        end = torch.where(is_end, after + 1, room + width).amin(dim=0, keepdim=True)
        is_over = end <= following
        following = torch.where(state.unfinished, following.minimum(end), length)
        state.unfinished.logical_and_(~is_over)
    tokens.index_copy_(0, after, torch.where(after < length, tokens[after], chosen))
    numbers = torch.arange(width, device=tokens.device)
    appended = tokens[(length + numbers).clamp(max=room - 1)]
    state.made.index_copy_(0, state.row, appended[None])
    state.counts.index_copy_(0, state.row, following - length)
    state.row.copy_((state.row + 1) % MOST_STEPS)
    length.copy_(following)


def _continuation(tokens: Tensor, length: Tensor, longest: int) -> Tensor:
    """Where what followed the last tokens begins, ``[1]``: after the first that are the same.

    As many as ``longest`` last ones are compared, or else fewer. ``length`` if none are the same.
    """
    numbers = torch.arange(tokens.shape[0], device=tokens.device)
    found = length
    for count in range(1, longest + 1):
        is_same = numbers + count < length
        for k in range(count):
            last = tokens[(length - count + k).clamp(min=0)]
            is_same = is_same & (tokens.roll(-k) == last)
        first = torch.where(is_same, numbers + count, length).amin(dim=0, keepdim=True)
        found = torch.where(first < length, first, found)
    return found


# ---- a call of `generate`


def _decode(wanted: Wanted, width: int, draft: Any) -> Any:
    """What ``_assisted_decoding`` returns: the prompt with the tokens that follow it."""
    model, ids = wanted.model, wanted.input_ids
    outputs, given, settle = prefilled(wanted)
    for name in ("position_ids", "logits_to_keep"):  # a turn has its own, and keeps all
        given.pop(name, None)
    state = _state(wanted, width, last_scores(outputs).argmax(dim=-1))
    del outputs
    known: list[int] = []
    try:
        with model._optimize_model_for_decode():
            _follow(wanted, known, state, _turns(wanted, given, state, draft))
    finally:
        settle(len(known))
    if wanted.streamer is not None:
        wanted.streamer.end()
    made = torch.tensor([known], dtype=ids.dtype).to(ids.device)
    return answer_of(wanted, torch.cat([ids, made], dim=-1))


def _turns(wanted: Wanted, given: dict[str, Any], state: _State, draft: Any) -> Steps:
    model, config = wanted.model, wanted.config
    if config.prompt_lookup_num_tokens:
        look_up, longest = compiled(_look_up, model), config.max_matching_ngram_size or 2
        return Steps([look_up], functools.partial(look_up, model, given, state, longest))
    cache = _cache_like(draft, wanted)
    draft(input_ids=wanted.input_ids, cache=cache, use_cache=True, logits_to_keep=1)
    others = {"cache": cache, "use_cache": True}
    propose, take = compiled(_draft, draft), compiled(_take_drafted, model)
    cursor, width = state.length - 1, state.made.shape[1]

    def turn() -> None:
        for _ in range(width):  # the last token is read as well: the next turn may begin behind it
            propose(draft, others, state, cursor)
        take(model, given, state, cursor)

    return Steps([*[propose] * width, take], turn)


def _state(wanted: Wanted, width: int, first: Tensor) -> _State:
    """After the first token, as if a turn had appended it."""
    ids = wanted.input_ids
    here: Any = {"device": ids.device, "dtype": ids.dtype}
    length = ids.shape[1]
    most = length + wanted.count
    # The last window ends where the cache does, and the model chooses what follows.
    tokens = torch.zeros(max(most, _room(wanted.keywords["cache"]) + 1), **here)
    tokens[: length + 1] = torch.cat([ids[0], first])
    torch._dynamo.maybe_mark_dynamic(tokens, 0)
    ends = torch.tensor(wanted.ends, **here) if wanted.ends else None
    unfinished = torch.ones(1, device=ids.device, dtype=torch.bool)
    if ends is not None:
        unfinished = ~torch.isin(first, ends)
    counts = torch.ones(MOST_STEPS, **here)
    made = first.expand(MOST_STEPS, width).contiguous()
    known, limit, row = (torch.full((1,), value, **here) for value in (length + 1, most, 1))
    return _State(tokens, known, limit, unfinished, ends, made, counts, row)


def _follow(wanted: Wanted, known: list[int], state: _State, turns: Steps) -> None:
    """Makes turns until enough tokens are known; the last ones are made while others arrive."""
    pace = Pace()
    arrived, made = 0, 1
    while True:
        arrive = start_to_host([state.made, state.counts])
        # As if those to come appended as many as those before.
        rate = len(known) / arrived if arrived else 1
        left = math.ceil((wanted.count - len(known)) / rate) - (made - arrived)
        count = max(0, min(pace.together, left))
        turns.run(count)
        appended, counts = arrive()
        for number in range(arrived, made):
            row = number % MOST_STEPS
            tokens = appended[None, row, : counts[row]]
            known += tokens[0].tolist()
            if wanted.streamer is not None and tokens.numel():
                wanted.streamer.put(tokens)
        if len(known) == wanted.count or known[-1] in wanted.ends:
            return
        pace.note()
        arrived, made = made, made + count
