"""`transformers serve`: it outlives a lost GPU, and its errors tell a client what was wrong.

Patched: when they are imported, in ``transformers.cli.serving`` of ``server`` ``build_server``, and
of ``utils`` ``BaseHandler._resolve_model``, ``_StreamError.__init__``, ``reset_torch_cache``, and
``generate_streaming`` and ``generate_non_streaming`` of ``GenerateManager`` and
``CBGenerateManager``. Tried with transformers 5.24; where a version has no such function, nothing
is changed.

Why: what the GPU cannot do ends in "Internal Server Error" without a reason, and in a stream with
a message of several lines as a line that is no JSON. A prompt with more tokens than the model has
positions is found by a kernel, which with continuous batching ends the thread that serves all. A
lost GPU leaves a server that refuses every request, though the device can be opened again. A model
that is unloaded leaves its memory with the device, where no other process can have it.

Until: the server answers errors with their messages as JSON, refuses prompts that are too long, and
empties the cache of ``torch.accelerator``.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch

from ...errors import DeviceLostError, IndexOutOfRangeError
from ...tensors import devices
from ..import_hooks import around

_logger = logging.getLogger(__name__)

_MANAGERS = [f"transformers.cli.serving.utils:{kind}GenerateManager" for kind in ("", "CB")]


class _PromptTooLong(ValueError):
    """A prompt that a model, or the cache of continuous batching, has no room for."""


# Whose message a client gets: the code of HTTP, and what OpenAI's interface calls them.
_ANSWERS: tuple[tuple[type[Exception], int, str, str], ...] = (
    (_PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (IndexOutOfRangeError, 400, "invalid_request_error", "index_out_of_range"),
    (DeviceLostError, 503, "server_error", "device_lost"),
    (torch.OutOfMemoryError, 503, "server_error", "out_of_memory"),
    (RuntimeError, 500, "server_error", "failed"),  # what is none of these, nor the server's own
)


@around("transformers.cli.serving.server:build_server")
def build_server(build: Any, *arguments: Any, **keywords: Any) -> Any:
    app = build(*arguments, **keywords)
    for error, status, kind, code in _ANSWERS:
        app.add_exception_handler(error, _answer_with(status, kind, code))
    return app


def _answer_with(status: int, kind: str, code: str) -> Any:
    async def answer(request: Any, error: Exception) -> Any:
        from fastapi.responses import JSONResponse

        _logger.error("%s: %s", request.url.path, error, exc_info=status >= 500 and error)
        told = {"message": str(error), "type": kind, "param": None, "code": code}
        return JSONResponse({"error": told}, status_code=status)

    return answer


@around("transformers.cli.serving.utils:_StreamError.__init__")
def stream_error(make: Any, self: Any, msg: str) -> None:
    """What puts the message between quotation marks does not escape it."""
    make(self, json.dumps(" ".join(msg.split()).replace('"', "'"))[1:-1])


# ---- a lost GPU


@around("transformers.cli.serving.utils:BaseHandler._resolve_model")
def resolve_model(resolve: Any, self: Any, body: Any) -> Any:
    """Models are loaded again on the device that takes the place of a lost one."""
    lost = [device for device in devices.opened() if device.find_loss()]
    if lost:
        _logger.warning("models are loaded again, as %s was lost", lost[0].info.name)
        self.generation_state.shutdown()
        self.model_manager.shutdown()
        for index in range(devices.device_count()):
            torch.get_device_module(devices.NAME).reset_device(index)
    return resolve(self, body)


@around("transformers.cli.serving.utils:reset_torch_cache")
def empty_cache(empty: Any) -> None:
    empty()
    if any(not device.find_loss() for device in devices.opened()):
        torch.get_device_module(devices.NAME).empty_cache()


# ---- prompts that are too long


@around(*(f"{manager}.generate_streaming" for manager in _MANAGERS))
def generate_streaming(
    generate: Any, self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, **rest: Any
) -> Any:
    _check_prompt(self, model, inputs, gen_config)
    return generate(self, model, processor, inputs, gen_config, **rest)


@around(*(f"{manager}.generate_non_streaming" for manager in _MANAGERS))
async def generate_non_streaming(
    generate: Any, self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, **rest: Any
) -> Any:
    _check_prompt(self, model, inputs, gen_config)
    return await generate(self, model, processor, inputs, gen_config, **rest)


def _check_prompt(manager: Any, model: Any, inputs: Any, gen_config: Any) -> None:
    """Refuses a prompt without room for a token after it, and bounds how many may be generated.

    Raises:
        _PromptTooLong: there is no room.
    """
    tokens = inputs.get("input_ids")
    if tokens is None or model.device.type != devices.NAME:
        return
    count = len(tokens) if isinstance(tokens, list) else tokens.shape[-1]
    config = model.config.get_text_config()
    positions, has_table = _positions(config)
    if positions is not None and count >= positions:
        raise _PromptTooLong(
            f"the prompt has {count:,} tokens, and the model has {positions:,} positions for them "
            "and its answer"
        )
    room = _room_in_cache(manager)
    if room is not None and count >= room:
        raise _PromptTooLong(
            f"the prompt has {count:,} tokens, and the cache of continuous batching has room for "
            f"{room:,}; start the server with a larger --cb-num-blocks"
        )
    if positions is not None and has_table and gen_config.max_new_tokens is not None:
        gen_config.max_new_tokens = min(gen_config.max_new_tokens, positions - count)


def _room_in_cache(manager: Any) -> int | None:
    """Tokens that the paged cache has room for; None where there is none, or none yet."""
    processor = getattr(getattr(manager, "_cb", None), "batch_processor", None)
    return None if processor is None else int(processor.cache.max_tokens_read)


def _positions(config: Any) -> tuple[int | None, bool]:
    """How many positions a model has, if it says so; whether there is a table of them.

    Rotary embeddings that are scaled go further than their number says.
    """
    positions = getattr(config, "max_position_embeddings", None)
    rotary = getattr(config, "rope_parameters", None)
    if not isinstance(positions, int):
        return None, False
    if rotary is None:
        return positions, True
    parts = [part for part in rotary.values() if isinstance(part, dict)] or [rotary]
    is_plain = all(part.get("rope_type", "default") == "default" for part in parts)
    return (positions if is_plain else None), False
