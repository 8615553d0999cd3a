"""`transformers`: prompt lookup finds, checks and takes its tokens on the GPU.

Patched: when it is imported, ``GenerationMixin._assisted_decoding`` in
``transformers.generation.utils``. Tried with transformers 5.24; where a version's has other
parameters, nothing is changed.

Why: ``generate(…, prompt_lookup_num_tokens=10)`` reads on the host, several times for each turn,
what matched and how many tokens were right, and each turn has another number of tokens, for which
a step is compiled anew. With a static cache it writes behind the cache's end in its last turns, and
fails. Here a turn is a compiled step for a window of always as many tokens, with greedy choices: it
looks up what followed the last tokens when they came before, checks that, and leaves what was right
where the next one reads it. Turns are submitted together as steps of `decoding` are.

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
    last_scores,
    prefilled,
    wanted_of,
)
from .generation import OF_SAMPLE, sampling_of

_OF_ASSISTED = OF_SAMPLE.replace(
    "streamer", "streamer inputs_tensor assistant_model assistant_tokenizer tokenizer"
)
_OTHER_KINDS = "assistant_early_exit use_mtp speculation_type assistant_ensemble_weight"


@around("transformers.generation.utils:GenerationMixin._assisted_decoding")
def assist(original: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
    config = keywords.get("generation_config")
    count = getattr(config, "prompt_lookup_num_tokens", None)
    if not count or any(getattr(config, name, None) for name in _OTHER_KINDS.split()):
        return original(self, *arguments, **keywords)
    wanted = wanted_of(inspect.unwrap(original), _OF_ASSISTED, self, arguments, keywords)
    if wanted is None or not _can_look_up(wanted, count):
        return original(self, *arguments, **keywords)
    with sampling_of(self, keywords):
        return _decode(wanted, count + 1)


def _can_look_up(wanted: Wanted, count: int) -> bool:
    """Whether greedy tokens of one prompt are asked for, and the cache has room for a window."""
    is_greedy = not (wanted.processors or wanted.config.do_sample)
    layers = wanted.keywords["cache"].layers
    room = min(layer.max_cache_len for layer in layers)
    return is_greedy and len(wanted.input_ids) == 1 and count < room


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


def _turn(model: Any, others: dict[str, Any], state: _State, longest: int) -> None:
    """Appends the tokens that were proposed rightly, and the one that follows them.

    The window of tokens that the model is given ends with those that are proposed; it begins with
    the last known one, or earlier at the end of the cache, where known ones are computed again.
    """
    tokens, length, cache = state.tokens, state.length, others["cache"]
    width, room = state.made.shape[1], tokens.shape[0]
    begin = (length - 1).clamp(max=min(layer.max_cache_len for layer in cache.layers) - width)
    numbers = torch.arange(width, device=tokens.device)
    window = begin + numbers
    source = _continuation(tokens, length, longest) + (window - length)
    given = torch.where(window < length, tokens[window], tokens[source.clamp(min=0, max=room - 1)])
    for layer in cache.layers:
        layer.cumulative_length.copy_(begin[0])
    outputs = model(input_ids=given[None], position_ids=window[None], **others, return_dict=True)
    chosen = outputs.logits[0].argmax(dim=-1)
    is_right = (window < length) | ((source < length) & (given == chosen.roll(1)))
    following = begin + 1 + torch.where(is_right, width, numbers).amin(dim=0, keepdim=True)
    following = following.minimum(state.most)
    after = window + 1
    if state.ends is not None:
        is_end = torch.isin(chosen, state.ends) & (after >= length)
        end = torch.where(is_end, after + 1, room + width).amin(dim=0, keepdim=True)
        is_over = end <= following
        following = torch.where(state.unfinished, following.minimum(end), length)
        state.unfinished.logical_and_(~is_over)
    tokens.index_copy_(0, after, torch.where(after < length, tokens[after], chosen))
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


def _decode(wanted: Wanted, width: int) -> Any:
    """What ``_assisted_decoding`` returns: the prompt with the tokens that follow it."""
    model, ids = wanted.model, wanted.input_ids
    outputs, given, settle = prefilled(wanted)
    for name in ("position_ids", "logits_to_keep"):  # a turn has its own, and keeps all
        given.pop(name, None)
    state = _state(wanted, width, last_scores(outputs).argmax(dim=-1))
    del outputs
    turn = compiled(_turn, model)
    longest = wanted.config.max_matching_ngram_size or 2
    turns = Steps([turn], functools.partial(turn, model, given, state, longest))
    known: list[int] = []
    try:
        with model._optimize_model_for_decode():
            _follow(wanted, known, state, turns)
    finally:
        settle(len(known))
    if wanted.streamer is not None:
        wanted.streamer.end()
    made = torch.tensor([known], dtype=ids.dtype).to(ids.device)
    return answer_of(wanted, torch.cat([ids, made], dim=-1))


def _state(wanted: Wanted, width: int, first: Tensor) -> _State:
    """After the first token, as if a turn had appended it."""
    ids = wanted.input_ids
    here: Any = {"device": ids.device, "dtype": ids.dtype}
    length = ids.shape[1]
    most = length + wanted.count
    # The last window ends where the cache does, and the model chooses what follows.
    cached = max(layer.max_cache_len for layer in wanted.keywords["cache"].layers)
    tokens = torch.zeros(max(most, cached + 1), **here)
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
