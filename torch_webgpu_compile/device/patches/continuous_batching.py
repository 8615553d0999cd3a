"""`transformers`: continuous batching sizes its paged cache by what the device can hold.

Patched: when they are imported, in ``transformers.generation.continuous_batching`` of ``cache``
``PagedAttentionCache.__init__``, ``get_device_and_memory_breakdown`` and
``PagedAttentionMemoryHandler.infer_max_batch_tokens_and_num_sectors``, of ``initialization``
``resolve_max_memory_percent``, of ``offloading_manager`` ``OffloadingManager.offload_requests``, of
``continuous_api`` ``ContinuousBatchingManager._create_batch_processor`` and
``ContinuousBatchProcessor.prepare_next_batch``, and of ``input_outputs`` the list
``ContinuousBatchingAsyncIOs._supported_device_types``. Tried with transformers 5.24; where a
version has no such function or list, nothing is changed.

Why: ``generate_batch`` and ``transformers serve --continuous-batching`` give their cache and masks
nine tenths of a device's memory, which they ask of CUDA, XPU and MPS. For this device they would
take that of the host: of a GPU without memory of its own all but what the system needs, of another
one a number that says nothing. Neither the cache nor a mask is a tensor that fits into a buffer
then, and kernels read one that fits into a binding without a plan for each of its sizes. One
request that needs more than the whole cache ends the thread that serves all, now and later. And
``use_async_batching``, which needs streams and events, is left to devices whose names are listed.

Until: ``get_device_and_memory_breakdown`` asks the device's module, devices can say how large a
tensor may be, such a request fails alone, and the list asks the module for streams.
"""

from __future__ import annotations

import copy
import gc
from contextvars import ContextVar
from typing import Any

import torch

from ...tensors import devices
from ..import_hooks import after_import, around

_PACKAGE = "transformers.generation.continuous_batching"
_CACHED_PER_TOKEN = 8  # a mask leaves room for so many times the tokens of a batch, at least

_MOST_HALVINGS = 5

_index: ContextVar[int | None] = ContextVar("index", default=None)
_halvings: ContextVar[int] = ContextVar("halvings", default=0)


def install() -> None:
    """Adds the device to the list, once it is imported."""
    after_import(f"{_PACKAGE}.input_outputs", _allow_async)


def _allow_async(module: Any) -> None:
    batches: Any = getattr(module, "ContinuousBatchingAsyncIOs", None)
    types = getattr(batches, "_supported_device_types", None)
    if isinstance(types, tuple) and devices.NAME not in types:
        batches._supported_device_types = (*types, devices.NAME)


@around(f"{_PACKAGE}.continuous_api:ContinuousBatchingManager._create_batch_processor")
def create_batch_processor(create: Any, self: Any) -> Any:
    """Where a GPU has less memory than was hoped for, half of it is tried, and half of that."""
    if self.model.device.type != devices.NAME:
        return create(self)
    given = copy.copy(self.continuous_batching_config)  # the original writes what it chose
    halvings = 0
    while True:
        token = _halvings.set(halvings)
        try:
            return create(self)
        except torch.OutOfMemoryError:
            if given.num_blocks is not None or halvings == _MOST_HALVINGS:
                raise
        finally:
            _halvings.reset(token)
        halvings += 1
        self.continuous_batching_config = copy.copy(given)
        gc.collect()
        torch.get_device_module(devices.NAME).empty_cache()


@around(f"{_PACKAGE}.cache:PagedAttentionCache.__init__")
def make_cache(make: Any, self: Any, *arguments: Any, **keywords: Any) -> None:
    """Has the functions below know the device, which they are not given."""
    given = [*arguments, *keywords.values()]
    found = [value for value in given if isinstance(value, torch.device)]
    is_here = len(found) == 1 and found[0].type == devices.NAME
    token = _index.set(devices.resolve_index(found[0]) if is_here else None)
    try:
        make(self, *arguments, **keywords)
    finally:
        _index.reset(token)


@around(f"{_PACKAGE}.cache:get_device_and_memory_breakdown")
def memory_breakdown(ask: Any) -> tuple[torch.device, int, int, int]:
    """The device, and bytes: those that may be used, are taken from it, and are not free.

    Of a GPU with memory of its own, of which WebGPU tells nothing, two bindings may be used: what
    larger GPUs have beside is for who names a number of blocks.
    """
    index = _index.get()
    if index is None:
        found: tuple[torch.device, int, int, int] = ask()
        return found
    module = torch.get_device_module(devices.NAME)
    module.empty_cache()
    device = devices.get_device(index)
    reserved = module.memory_reserved(index)
    try:
        free, total = module.mem_get_info(index)
    except NotImplementedError:
        free = 2 * device.target.max_binding_nbytes
        total = reserved + free
    if device.pool.limit_nbytes is not None:
        free = min(free, max(0, device.pool.limit_nbytes - reserved))
    return torch.device(devices.NAME, index), total, reserved, total - free


@around(f"{_PACKAGE}.cache:PagedAttentionMemoryHandler.infer_max_batch_tokens_and_num_sectors")
def fit_tensors(infer: Any, self: Any) -> tuple[int, int]:
    """The tokens of a batch, and sectors of the cache; what is not given fits into a binding."""
    index = _index.get()
    if index is None:
        chosen: tuple[int, int] = infer(self)
        return chosen
    nbytes = devices.get_device(index).target.max_binding_nbytes >> _halvings.get()
    has_masks = self.num_attention_masks > 0
    mask_nbytes = self.activation_dtype.itemsize
    if has_masks and self.cb_config.max_batch_tokens is None:
        tokens = self._default_max_batch_tokens
        while tokens * _CACHED_PER_TOKEN * tokens * mask_nbytes > nbytes:
            tokens //= 2
        self._default_max_batch_tokens = tokens
    tokens, sectors = infer(self)
    if self.cb_config.num_blocks is not None:
        return tokens, sectors
    most = (nbytes - self.trash_bytes) // self.bytes_per_sector
    if has_masks:
        most = min(most, (nbytes // (tokens * mask_nbytes) - tokens) // self.tokens_per_sector)
    return tokens, min(sectors, max(1, most))


@around(f"{_PACKAGE}.initialization:resolve_max_memory_percent")
def memory_percent(resolve: Any, *arguments: Any, **keywords: Any) -> None:
    """A GPU that shares the host's memory gets the part that a CPU gets."""
    device = keywords.get("device")
    if getattr(device, "type", None) == devices.NAME:
        properties = torch.get_device_module(devices.NAME).get_device_properties(device)
        if properties.total_memory_is_known:
            keywords["device"] = torch.device("cpu")
    resolve(*arguments, **keywords)


# ---- requests that the cache has no room for


class _NoRoom(RuntimeError):
    """No room can be made for what a request needs next.

    Args:
        request: its state.
        room: how many tokens the cache has room for.
    """

    def __init__(self, request: Any, room: int) -> None:
        self.request = request
        count = len(request.initial_tokens) + len(request.generated_tokens)
        super().__init__(
            f"a request of {count:,} tokens needs more than the cache of continuous batching has "
            f"room for, which is {room:,} tokens; give it more blocks (num_blocks of the "
            "configuration, --cb-num-blocks)"
        )


@around(f"{_PACKAGE}.offloading_manager:OffloadingManager.offload_requests")
def offload_requests(offload: Any, self: Any) -> bool:
    """Names the request for which nothing is left to be offloaded."""
    starved = [request for request, _ in self.scheduler.starved_requests]
    if offload(self):
        return True
    candidates = starved or self.scheduler._get_waiting_candidates()
    if not candidates or torch.device(self.cache.device).type != devices.NAME:
        return False
    raise _NoRoom(candidates[0], self.cache.max_tokens_read)


@around(f"{_PACKAGE}.continuous_api:ContinuousBatchProcessor.prepare_next_batch")
def prepare_next_batch(prepare: Any, self: Any) -> bool:
    """Fails that request alone: the others go on."""
    while True:
        try:
            is_ready: bool = prepare(self)
            return is_ready
        except _NoRoom as error:
            self._handle_request_error(error, error.request)
            self.scheduler.set_request_cancellation(error.request.request_id)
