"""`transformers`: processors of scores and the choice of the next token are one compiled plan.

Patched: when it is imported, ``GenerationMixin._sample`` in ``transformers.generation.utils``,
which is given another list of processors. Tried with transformers 5.24; where a version's has other
parameters, nothing is changed.

Why: what is between scores and a token (penalties, temperature, top-k, top-p, ``multinomial``) is
up to fifty operators for each token. On the device they are eager calls, also where ``generate``
compiles its steps, and those that read the tokens so far get a new size each time. Compiled, they
are one plan for all lengths. It draws as eager calls do, so that a seed gives the same tokens. What
users wrote is called as ever, and so is everything if the steps are not compiled.

Until: ``generate`` compiles them itself.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ...tensors import devices
from ..import_hooks import around
from .generation import OF_SAMPLE, takes

_WARPERS = "Temperature TopK TopP MinP Typical Epsilon Eta"
_PROCESSORS = (
    "RepetitionPenalty NoRepeatNGram SequenceBias NoBadWords MinLength MinNewTokensLength "
    "ForcedBOSToken ForcedEOSToken InfNanRemove SuppressTokens SuppressTokensAtBegin"
)
_TRIED = frozenset(
    (
        "LogitNormalization",
        *(f"{name}LogitsWarper" for name in _WARPERS.split()),
        *(f"{name}LogitsProcessor" for name in _PROCESSORS.split()),
    )
)
"""Of ``transformers.generation.logits_process``. Others keep a state, ask for numbers on the host,
or have a length as an exponent, as ``ExponentialDecayLengthPenalty``: a plan computes that in f32.
"""

_GREEDY_TOKENS = 64
"""After so many tokens without samples processors are compiled: the eager calls for so many lengths
that are new take as long as compiling, 0.4 s on two CPU cores. Shorter answers do without.
"""

_log = logging.getLogger(__name__)

_Processors = Sequence[Callable[[Tensor, Tensor], Tensor]]
_Kind = Callable[[_Processors, Tensor, Tensor], Tensor]


# ---- what is compiled


def _process(processors: _Processors, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Scores of the next token ``[batch, vocabulary]``, given the tokens so far."""
    for processor in processors:
        scores = processor(input_ids, scores)
    return scores


def draw(processors: _Processors, input_ids: Tensor, scores: Tensor) -> Tensor:
    """The next token ``[batch, 1]``, drawn as ``_sample`` draws it."""
    scores = _process(processors, input_ids, scores)
    return torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1)


def take_greatest(processors: _Processors, input_ids: Tensor, scores: Tensor) -> Tensor:
    """The next token ``[batch]``."""
    return torch.argmax(_process(processors, input_ids, scores), dim=-1)


_failed: set[tuple[Any, ...]] = set()
_eager_tokens = Counter[tuple[Any, ...]]()


def named(function: Callable[..., Any], *types: type) -> Callable[..., Any]:
    """The function with a code object of its own, and the types in its name.

    Dynamo keeps and bounds what it has compiled by the code object, the precompile cache by name.
    """
    assert isinstance(function, FunctionType)
    name = "_".join((function.__name__, *(of.__name__ for of in types)))
    code = function.__code__.replace(co_name=name, co_qualname=name)
    return FunctionType(code, function.__globals__, name)


@functools.cache
def _compiled(kind: _Kind, *types: type) -> _Kind:
    compiled: _Kind = torch.compile(named(kind, *types), backend=devices.NAME)
    return compiled


def _run(
    kind: _Kind, processors: _Processors, input_ids: Tensor, scores: Tensor, wait: int
) -> Tensor:
    """Calls ``kind``, which is compiled after ``wait`` tokens."""
    key = (kind, *map(type, processors))
    if _eager_tokens[key] < wait:
        _eager_tokens[key] += 1
    elif key not in _failed:
        for processor in processors:
            # In its first call words become tensors; what Dynamo sees then depends on no words.
            if not getattr(processor, "prepared_bias_variables", True):
                processor(input_ids, scores)
        torch._dynamo.maybe_mark_dynamic(input_ids, 1)
        try:
            return _compiled(*key)(processors, input_ids, scores)
        except Exception as error:  # if it is not of Dynamo or the compiler, it comes again
            _failed.add(key)
            _log.info("processors of scores are not compiled: %s", error)
    return kind(processors, input_ids, scores)


# ---- what `_sample` gets


class _Chosen:
    """In the place of the scores, of which ``_sample`` only chooses a token: that token."""

    def __init__(self, token: Tensor) -> None:
        self.token = token

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        if function is torch.nn.functional.softmax:
            return arguments[0]
        is_choice = function in (torch.multinomial, torch.argmax)
        return arguments[0].token if is_choice else NotImplemented


@functools.cache
def _compiling_list() -> Any:
    from transformers.generation.logits_process import LogitsProcessorList

    class CompilingList(LogitsProcessorList):
        """A list of processors that gives ``_sample`` a choice in place of scores, if it may.

        Attributes:
            parts: processors that were tried, and others, in turns.
            choose: what is done with scores at last.
            wait: how many tokens are chosen eagerly before.
        """

        def __init__(self, processors: Sequence[Any], choose: _Kind, wait: int) -> None:
            super().__init__(processors)
            grouped = itertools.groupby(processors, _is_tried)
            self.parts = [(tried, LogitsProcessorList(part)) for tried, part in grouped]
            self.choose, self.wait = choose, wait

        def __call__(self, input_ids: Any, scores: Tensor, **keywords: Any) -> Any:
            for number, (is_tried, part) in enumerate(self.parts, 1):
                kind = self.choose if number == len(self.parts) else _process
                if is_tried:
                    scores = _run(kind, tuple(part), input_ids, scores, self.wait)
                else:
                    kind, scores = _process, part(input_ids, scores, **keywords)
            return scores if kind is _process else _Chosen(scores)

    return CompilingList


def _is_tried(processor: Any) -> bool:
    kind = type(processor)
    return kind.__module__ == "transformers.generation.logits_process" and kind.__name__ in _TRIED


@around("transformers.generation.utils:GenerationMixin._sample")
def sample(original: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
    processors, config = keywords.get("logits_processor"), keywords.get("generation_config")
    if (
        processors
        and config is not None
        and self.device.type == devices.NAME
        and _is_as_tried(inspect.unwrap(original))
        and self._valid_auto_compile_criteria(keywords, config)
    ):
        wants_scores = config.return_dict_in_generate and config.output_scores
        choose = draw if config.do_sample else take_greatest
        keywords["logits_processor"] = _compiling_list()(
            processors,
            _process if wants_scores else choose,
            0 if config.do_sample else _GREEDY_TOKENS,
        )
    return original(self, *arguments, **keywords)


@functools.cache
def _is_as_tried(function: Any) -> bool:
    """Whether ``_sample`` does with scores what `_Chosen` answers."""
    uses = set(function.__code__.co_names)
    return takes(function, OF_SAMPLE) and {"softmax", "multinomial", "argmax"} <= uses
