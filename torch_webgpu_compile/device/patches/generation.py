"""`transformers`: between two tokens, ``generate`` neither waits nor computes what nobody needs.

Patched: when it is imported, in ``transformers.generation.utils`` ``DeferredStopCheck``,
``create_masks_for_generate``, and of ``GenerationMixin`` ``_sample`` and
``_update_model_kwargs_for_generation``; in ``transformers.generation.stopping_criteria``
``StoppingCriteriaList.__call__``. Tried with transformers 5.24; where a version has not such
functions with just the parameters of that one, nothing is changed.

Why: ``generate`` makes twenty-five operators between two tokens, each of which takes as long on the
host as four dispatches of a compiled step, and reads whether all sequences are finished, during
which the GPU has nothing to do.

- Its ``DeferredStopCheck`` reads that after it has submitted the next token, which it drops if it
  was not wanted, but only on the device type "mps".
- It makes the mask of a static cache eagerly. Where no prompt is padded, the compiled step makes it
  itself, and attention then reads no further than the cache is filled.
- It appends to the position ids of all tokens, of which it uses the last.
- It asks a length that is not reached on the GPU.

Until: ``DeferredStopCheck.is_supported`` asks the device, and copies to the host may be awaited;
for the rest, ``generate`` does the same itself.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from ...tensors import devices, generators
from ...tensors.copying import start_to_host
from ..import_hooks import after_import, around

# The functions' parameters.
_OF_STOP_CHECK = {
    "__init__": "self input_ids max_length cache cache_is_returned streamer",
    "__call__": "self unfinished_sequences tokens length",
    "is_supported": "device cache cache_is_returned is_assistant",
    "finish": "self",
}
_OF_MASKS = (
    "config inputs_embeds attention_mask cache position_ids or_mask_function and_mask_function "
    "block_sequence_ids kwargs"
)
OF_SAMPLE = (
    "self input_ids logits_processor stopping_criteria generation_config synced_gpus streamer "
    "model_kwargs"
)
_OF_UPDATE = "self outputs model_kwargs is_encoder_decoder num_new_tokens"


@dataclass(frozen=True)
class _Sampling:
    """A call of ``_sample``.

    Attributes:
        model: whose.
        may_defer: nobody notices that it computes a token more than is wanted.
        only_length: it ends nowhere but at a length, which the host knows.
    """

    model: Any
    may_defer: bool
    only_length: bool


_sampling: ContextVar[_Sampling | None] = ContextVar("sampling", default=None)


def install() -> None:
    """Has ``generate`` use another `DeferredStopCheck`, once ``transformers`` is imported."""
    after_import("transformers.generation.utils", _stop_late)


@functools.cache
def takes(function: Any, parameters: str) -> bool:
    """Whether a function has just these parameters."""
    return list(inspect.signature(function).parameters) == parameters.split()


# ---- when to stop


@around("transformers.generation.stopping_criteria:StoppingCriteriaList.__call__")
def ask_less(ask: Any, self: Any, input_ids: Tensor, scores: Any, **keywords: Any) -> Any:
    from transformers.generation.stopping_criteria import MaxLengthCriteria

    is_known = takes(ask, "self input_ids scores kwargs")
    if input_ids.device.type != devices.NAME or not is_known:
        return ask(self, input_ids, scores, **keywords)
    count, done = input_ids.shape[1], None
    for part in self:
        is_length = type(part) is MaxLengthCriteria
        if is_length and count < part.max_length and is_within(part, count):
            continue  # it would answer no
        answer = part(input_ids, scores, **keywords)
        done = (
            answer
            if done is None and _is_answer(answer, input_ids)
            else ((_no(input_ids) if done is None else done) | answer)
        )
    return _no(input_ids) if done is None else done


def is_within(part: Any, count: int) -> bool:
    """Whether a criterion of length would not warn of so many tokens."""
    most = part.max_position_embeddings
    return most is None or bool(count <= most)


def _no(input_ids: Tensor) -> Tensor:
    """That no sequence is done."""
    return torch.full((input_ids.shape[0],), False, device=input_ids.device, dtype=torch.bool)


def _is_answer(answer: Any, input_ids: Tensor) -> bool:
    return (
        isinstance(answer, Tensor)
        and answer.dtype is torch.bool
        and answer.shape == input_ids.shape[:1]
        and answer.device == input_ids.device
    )


@around("transformers.generation.utils:GenerationMixin._sample")
def sample(original: Any, self: Any, *arguments: Any, **keywords: Any) -> Any:
    with sampling_of(self, keywords):
        return original(self, *arguments, **keywords)


@contextmanager
def sampling_of(model: Any, keywords: dict[str, Any]) -> Iterator[None]:
    """Of a call of ``_sample`` with these keywords: what is patched here is so within."""
    from transformers.generation.stopping_criteria import MaxLengthCriteria

    criteria = keywords.get("stopping_criteria")
    only_length = [type(part) for part in criteria or ()] == [MaxLengthCriteria]
    token = _sampling.set(_Sampling(model, _is_repeatable(keywords), only_length))
    try:
        yield
    finally:
        _sampling.reset(token)


def _stop_late(module: Any) -> None:
    check: Any = getattr(module, "DeferredStopCheck", None)
    methods = {getattr(check, name, None): given for name, given in _OF_STOP_CHECK.items()}
    if all(method and takes(method, given) for method, given in methods.items()):
        module.DeferredStopCheck = _late_stop_check(module, check)


def _is_repeatable(keywords: dict[str, Any]) -> bool:
    """Whether nobody notices that a token more is computed than is wanted.

    What a user wrote may count, print, or change the model: it is called for the wanted tokens.
    """
    processors, criteria = keywords.get("logits_processor"), keywords.get("stopping_criteria")
    if keywords.get("synced_gpus") or processors is None or criteria is None:
        return False
    streamer = keywords.get("streamer")
    return _are_known([*processors, *criteria, *([] if streamer is None else [streamer])])


def _are_known(parts: Iterable[Any]) -> bool:
    for part in parts:
        if type(part).__module__.partition(".")[0] != "transformers":
            return False
        if any(isinstance(value, (FunctionType, MethodType)) for value in vars(part).values()):
            return False  # as of ``prefix_allowed_tokens_fn``
    return True


def _late_stop_check(module: Any, check: Any) -> type:
    class LateStopCheck(check):  # type: ignore[misc]
        """``DeferredStopCheck`` by downloads, in place of copies to pinned memory and events."""

        def __init__(
            self,
            input_ids: Tensor,
            max_length: int | None,
            cache: Any,
            cache_is_returned: bool,
            streamer: Any = None,
        ) -> None:
            self._index: int | None = None
            if input_ids.device.type != devices.NAME:
                super().__init__(input_ids, max_length, cache, cache_is_returned, streamer)
                return
            module.StopCheck.__init__(self, streamer)
            self.max_length = max_length
            self.stop_reported = False
            self._index = input_ids.get_device()
            sampling = _sampling.get()
            self._reads = streamer is not None or sampling is None or not sampling.only_length
            self._arrive: Callable[[], list[Tensor]] | None = None
            # Of the generator, after the tokens before: the one that is dropped has drawn from it.
            self._states = deque[Tensor](maxlen=2)

        @staticmethod
        def is_supported(
            device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool
        ) -> bool:
            """Also on ``webgpu``, where the user does not get the cache, which has a token more."""
            if device.type != devices.NAME:
                return bool(check.is_supported(device, cache, cache_is_returned, is_assistant))
            sampling = _sampling.get()
            may_defer = sampling is not None and sampling.may_defer
            return may_defer and not cache_is_returned and not is_assistant

        def __call__(self, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
            if self._index is None:
                return bool(super().__call__(unfinished_sequences, tokens, length))
            is_full = self.max_length is not None and length >= self.max_length
            if not self._reads:
                return is_full
            self._states.append(generators.get_rng_state(self._index))
            wanted = [unfinished_sequences, *([] if self.streamer is None else [tokens])]
            arrive, self._arrive = self._arrive, start_to_host([t.contiguous() for t in wanted])
            if arrive is not None:
                unfinished = self._take(arrive)
                self.stop_reported = not unfinished.any()
            return self.stop_reported or is_full

        def _take(self, arrive: Callable[[], list[Tensor]]) -> Tensor:
            """Which sequences a token left unfinished; gives the streamer its tokens."""
            unfinished, *tokens = arrive()
            for token in tokens:
                self.streamer.put(token)
            return unfinished

        def finish(self) -> int:
            if self._index is None:
                return int(super().finish())
            arrive, self._arrive = self._arrive, None
            if not self.stop_reported:
                if arrive is not None:
                    self._take(arrive)
                return 0
            if arrive is not None:
                arrive()  # it raises what kernels have reported
            before, after = self._states
            # Nobody else has drawn from it since.
            if after.equal(generators.get_rng_state(self._index)):
                generators.set_rng_state(before, self._index)
            return 1

    return LateStopCheck


# ---- what a step is given


@around("transformers.generation.utils:create_masks_for_generate")
def create_masks(make: Any, *arguments: Any, **keywords: Any) -> Any:
    is_known = not arguments and takes(make, _OF_MASKS)
    return None if is_known and _is_left_to_model(keywords) else make(*arguments, **keywords)


def _is_left_to_model(keywords: dict[str, Any]) -> bool:
    asked = {name for name, value in keywords.items() if value is not None}
    inputs, sampling = keywords.get("inputs_embeds"), _sampling.get()
    if inputs is None or inputs.device.type != devices.NAME or not asked <= _PLAIN:
        return False
    return sampling is not None and leaves_masks_to_model(sampling.model, keywords.get("cache"))


@functools.cache
def _makes_masks(model: Any) -> bool:
    """Whether the forward of a model makes its causal mask, and that of what it is given alone.

    Some count positions in a mask of ones, as long as the cache is filled: a size that is data.
    """
    forward: Any = getattr(model, "forward", None)
    code = getattr(inspect.unwrap(forward), "__code__", None)
    names = () if code is None else code.co_names
    return "create_causal_mask" in names and "ones" not in names


_PLAIN = {"config", "inputs_embeds", "cache", "position_ids", "is_first_iteration"}


def leaves_masks_to_model(model: Any, cache: Any) -> bool:
    """Whether a step with this cache, and no mask that is given, makes its mask itself."""
    from transformers.cache_utils import StaticLayer

    # A sliding window's layer knows its length as a number, which a step would be made for.
    layers = getattr(cache, "layers", ())
    is_static = layers and all(type(layer) is StaticLayer for layer in layers)
    return bool(is_static and _makes_masks(model.base_model.__class__))


@around("transformers.generation.utils:GenerationMixin._update_model_kwargs_for_generation")
def keep_one_position(
    update: Any,
    self: Any,
    outputs: Any,
    model_kwargs: dict[str, Any],
    *rest: Any,
    **keywords: Any,
) -> dict[str, Any]:
    named = {**dict(zip(_OF_UPDATE.split()[3:], rest, strict=False)), **keywords}
    is_plain = not named.get("is_encoder_decoder") and named.get("num_new_tokens", 1) == 1
    positions = None
    if is_plain and takes(update, _OF_UPDATE) and _needs_last(self, model_kwargs):
        positions = model_kwargs.pop("position_ids")
    updated: dict[str, Any] = update(self, outputs, model_kwargs, *rest, **keywords)
    if positions is not None:
        updated["position_ids"] = positions[..., -1:] + 1
    return updated


def _needs_last(model: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether the next step reads the last position only, as all do that have no other ways."""
    sampling, positions = _sampling.get(), model_kwargs.get("position_ids")
    return (
        sampling is not None
        and sampling.model is model
        and is_usual(model)
        and bool(model_kwargs.get("use_cache"))
        and positions is not None
        and positions.device.type == devices.NAME
    )


def is_usual(model: Any) -> bool:
    """Whether a model's steps are given what most are."""
    from transformers.generation.utils import GenerationMixin

    names = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
    return all(getattr(type(model), n) is getattr(GenerationMixin, n) for n in names)
