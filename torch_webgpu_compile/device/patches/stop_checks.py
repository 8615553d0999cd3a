"""`transformers`: ``generate`` learns one token late that it is done, and so never waits idly.

Patched: when it is imported, ``DeferredStopCheck`` and ``GenerationMixin._sample`` in
``transformers.generation.utils``. Tried with transformers 5.24; where a version has not both, with
the parameters of that one, nothing is changed.

Why: after each token ``generate`` reads whether all sequences are finished: the GPU has nothing to
do while the host prepares the next token. Its ``DeferredStopCheck`` reads it after it has
submitted the next token, which it drops if it was not wanted, but only on the device type "mps".

Until: ``DeferredStopCheck.is_supported`` asks the device, and copies to the host may be awaited.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from .. import devices, generators
from ..import_hooks import after_import
from ..tensors.copying import start_to_host

_PARAMETERS = {
    "__init__": ["self", "input_ids", "max_length", "cache", "cache_is_returned", "streamer"],
    "__call__": ["self", "unfinished_sequences", "tokens", "length"],
    "is_supported": ["device", "cache", "cache_is_returned", "is_assistant"],
    "finish": ["self"],
}

_may_defer: ContextVar[bool] = ContextVar("may_defer", default=False)


def install() -> None:
    """Has ``generate`` stop late on the device, once ``transformers`` is imported."""
    after_import("transformers.generation.utils", _defer)


def _defer(module: Any) -> None:
    check: Any = getattr(module, "DeferredStopCheck", None)
    mixin: Any = getattr(module, "GenerationMixin", None)
    sample = getattr(mixin, "_sample", None)
    if check is None or sample is None:
        return
    for name, parameters in _PARAMETERS.items():
        function = getattr(check, name, None)
        if function is None or list(inspect.signature(function).parameters) != parameters:
            return

    @functools.wraps(sample)
    def _sample(self: Any, *arguments: Any, **keywords: Any) -> Any:
        token = _may_defer.set(_is_repeatable(keywords))
        try:
            return sample(self, *arguments, **keywords)
        finally:
            _may_defer.reset(token)

    mixin._sample = _sample
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
        """``DeferredStopCheck`` with downloads in place of copies to pinned memory and events."""

        def __init__(
            self,
            input_ids: Tensor,
            max_length: int,
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
            self.cache = None  # it is dropped, see `is_supported`
            self.slots = deque(_slot() for _ in range(2))
            self.is_first_step = True
            self.stop_reported = False
            self._index = input_ids.get_device()
            # Of the generator, after the tokens before: the one that is dropped has drawn from it.
            self._states = deque[Tensor](maxlen=2)

        @staticmethod
        def is_supported(
            device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool
        ) -> bool:
            """Also on ``webgpu``, where the user does not get the cache, which has a token more."""
            if device.type != devices.NAME:
                return bool(check.is_supported(device, cache, cache_is_returned, is_assistant))
            return _may_defer.get() and not cache_is_returned and not is_assistant

        def __call__(self, unfinished_sequences: Tensor, tokens: Tensor, length: int) -> bool:
            if self._index is not None:
                self._states.append(generators.get_rng_state(self._index))
            return bool(super().__call__(unfinished_sequences, tokens, length))

        def finish(self) -> int:
            steps_to_undo: int = super().finish()
            if steps_to_undo and self._index is not None and len(self._states) == 2:
                before, after = self._states
                # Nobody else has drawn from it since.
                if after.equal(generators.get_rng_state(self._index)):
                    generators.set_rng_state(before, self._index)
            return steps_to_undo

    return LateStopCheck


class _Arrival:
    """In place of an event that is recorded behind copies to the host, and awaited."""

    def __init__(self) -> None:
        self._sent: list[_Value] = []
        self._finish: Callable[[], list[Tensor]] | None = None

    def send(self, value: _Value) -> None:
        """Has ``value.tensor`` downloaded by the next `record`."""
        self._sent.append(value)

    def record(self) -> None:
        """Submits the download of all that was sent, and what is before it in the queue."""
        self._finish = start_to_host([value.tensor for value in self._sent])

    def synchronize(self) -> None:
        """Waits for what was recorded last, if it has not been waited for."""
        finish, self._finish = self._finish, None
        sent, self._sent = self._sent, []
        if finish is not None:
            for value, arrived in zip(sent, finish(), strict=True):
                value.tensor = arrived


class _Value:
    """In place of a tensor in pinned memory.

    Attributes:
        tensor: on the device, and on the host once it has arrived.
    """

    def __init__(self, arrival: _Arrival) -> None:
        self._arrival = arrival
        self.tensor = torch.zeros(())

    def copy_(self, tensor: Tensor, non_blocking: bool) -> None:
        """Has a tensor of the device copied here by the next `_Arrival.record`."""
        self.tensor = tensor.contiguous()
        self._arrival.send(self)

    def clone(self) -> Tensor:
        """What has arrived."""
        return self.tensor.clone()

    def __bool__(self) -> bool:
        return bool(self.tensor)


def _slot() -> tuple[_Value, _Value, _Arrival]:
    """(whether to stop, tokens, their arrival) of a step, as ``DeferredStopCheck`` has them."""
    arrival = _Arrival()
    return _Value(arrival), _Value(arrival), arrival
