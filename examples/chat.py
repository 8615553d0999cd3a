"""A conversation with a language model on the GPU.

``python examples/chat.py FOLDER`` loads a checkpoint as transformers saves them (``config.json``,
tokenizer, safetensors), ``python examples/chat.py FILE.gguf`` a file of llama.cpp's, whose weights
stay packed, and answers line by line; Ctrl-C ends an answer. Each answer is followed by its tokens
per second, by the bytes that a token takes from memory (weights and cache), and by the share of the
rate of a copy on the same GPU. ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from torch_webgpu_compile.device.autoload import register

DEVICE = "webgpu"
COPY_NBYTES = 256 << 20
"""Of the copy that rates are compared with: more than a GPU's caches hold."""

Message = dict[str, str]
"""``role`` and ``content``, as chat templates take them."""


def synchronize() -> None:
    """Waits for the GPU."""
    torch.webgpu.synchronize()  # type: ignore[attr-defined]


def copy_bytes_per_second(nbytes: int) -> float:
    """Bytes read plus bytes written by a copy of ``nbytes`` bytes on the device."""
    source = torch.ones(nbytes // 4, device=DEVICE)
    destination = torch.empty_like(source)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            destination.copy_(source)
        synchronize()
        return (time.perf_counter() - start) / count

    once = min(seconds(1), seconds(1))  # the first writes new memory
    count = max(1, min(1000, round(0.05 / once)))
    return 2 * nbytes / statistics.median(seconds(count) for _ in range(5))


def load(path: str, dtype: str, int4: bool) -> tuple[Any, Any]:
    """The model of a folder or of a GGUF file on the device, and its tokenizer.

    Raises:
        SystemExit: there is no tokenizer or no model, it is damaged, or a package is missing.
    """
    folder, options = path, {}
    if path.endswith(".gguf"):
        folder, name = os.path.split(path)
        folder, options = folder or ".", {"gguf_file": name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model = AutoModelForCausalLM.from_pretrained(
            folder, device_map=DEVICE, dtype=dtype, **options
        )
    except Exception as error:  # a damaged file ends in whatever the library that reads it raises
        raise SystemExit(f"{path} is not a language model that can be loaded: {error}") from error
    if int4:
        quantize(model)
    return model.eval(), tokenizer


def quantize(model: nn.Module) -> None:
    """Makes the weights of linear layers numbers of four bits, in groups of 32 with one scale.

    Raises:
        SystemExit: torchao is not installed.
    """
    try:
        from torchao.quantization import Int4WeightOnlyConfig, quantize_
    except ImportError as error:
        raise SystemExit("--int4 needs torchao: pip install torchao") from error
    quantize_(model, Int4WeightOnlyConfig(group_size=32))


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor; of a quantized one, those of the tensors that it consists of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return tensor.nbytes
    return sum(nbytes_of(getattr(tensor, name)) for name in flatten()[0])


def weight_nbytes(model: Any) -> int:
    """Bytes of the weights that a token reads.

    Of the embedding that is one row, unless the last layer reads it too.
    """
    weights = {id(parameter): parameter for parameter in model.parameters()}
    embedding, last = model.get_input_embeddings(), model.get_output_embeddings()
    if last is None or last.weight is not embedding.weight:
        weights.pop(id(embedding.weight), None)
    return sum(map(nbytes_of, weights.values()))


def cache_nbytes(cache: Any, positions: int) -> int:
    """Bytes of the keys and values at the first ``positions``, or of the window that is kept."""
    total = 0
    for layer in cache.layers:
        for values in (layer.keys, layer.values):
            kept = values.shape[-2]
            total += values.nbytes // kept * min(positions, kept)
    return total


def encoded(tokenizer: Any, messages: Sequence[Message]) -> dict[str, Tensor]:
    """Tokens and mask by the tokenizer's chat template; without one, of the texts line by line."""
    if getattr(tokenizer, "chat_template", None):
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer("\n".join(m["content"] for m in messages), return_tensors="pt")
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


class Stopped(Exception):
    """Ctrl-C ended an answer."""


class Timed(TextStreamer):  # type: ignore[misc]
    """Prints tokens as they come, remembers them and when they did, and ends them at Ctrl-C.

    Attributes:
        times: of the tokens so far, in seconds.
        tokens: those.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []
        self.tokens: list[int] = []
        self._is_prompt = True
        self._is_stopped = False

    def put(self, value: Tensor) -> None:
        """Takes the prompt first, then each token."""
        if self._is_stopped:
            self.end()
            raise Stopped
        if not self._is_prompt:
            self.times.append(time.perf_counter())
            self.tokens += value.tolist()
        self._is_prompt = False
        super().put(value)

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """In here, Ctrl-C ends the answer before the next token, and a second one the program."""

        def stop(number: int, frame: Any) -> None:
            if self._is_stopped:
                raise KeyboardInterrupt
            self._is_stopped = True

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class Chat:
    """A model with a conversation.

    Args:
        model, tokenizer: as of `load`.
        context: positions of the cache; the oldest messages are forgotten to stay within them.
        tokens: of an answer, at most.
        sampling: further arguments of ``generate``.
        copy_rate: bytes per second of a copy.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        context: int,
        tokens: int,
        sampling: dict[str, Any],
        copy_rate: float,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._context, self._tokens, self._sampling = context, tokens, sampling
        self._copy_rate = copy_rate
        self._weights = weight_nbytes(model)
        self.messages: list[Message] = []

    def compile(self) -> float:
        """Has all compiled before the first answer needs it; the seconds it took."""
        start = time.perf_counter()
        # Several lengths: operators on the prompt are compiled for the first, then for all others,
        # and those that are multiples of four have kernels of their own. Two tokens: the first
        # comes of the prompt, the second of the compiled step.
        inputs = encoded(self._tokenizer, [{"role": "user", "content": "Hello, who are you?"}])
        for left in range(4):
            length = max(1, inputs["input_ids"].shape[1] - left)
            self._generate({name: tensor[:, :length] for name, tensor in inputs.items()}, 2)
        synchronize()
        return time.perf_counter() - start

    def answer(self, text: str) -> tuple[list[int], str]:
        """Prints the answer to ``text``, token by token; returns its tokens and its summary."""
        self.messages.append({"role": "user", "content": text})
        inputs = self._within_context()
        prompt = inputs["input_ids"].shape[1]
        streamer = Timed(self._tokenizer)
        start = time.perf_counter()
        result = None
        with suppress(Stopped), streamer.until_interrupted():
            result = self._generate(inputs, self._tokens, streamer)
        tokens = streamer.tokens if result is None else result.sequences[0, prompt:].tolist()
        content = self._tokenizer.decode(tokens, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": content})
        times = [t - start for t in streamer.times]
        if result is None:
            return tokens, f"[stopped after {len(times)} tokens]"
        return tokens, self._summary(prompt, times, result.cache)

    def _summary(self, prompt: int, times: Sequence[float], cache: Any) -> str:
        found = f"[{len(times)} tokens, the first after {times[0]:.2f} s"
        if len(times) < 2:
            return f"{found}]"
        rate = (len(times) - 1) / (times[-1] - times[0])
        nbytes = self._weights + cache_nbytes(cache, prompt + len(times) // 2)
        return (
            f"{found}; then {rate:,.1f} tokens/s · {nbytes / 1e6:,.1f} MB per token · "
            f"{rate * nbytes / 1e9:,.1f} GB/s, {rate * nbytes / self._copy_rate:.0%} of a copy]"
        )

    def _generate(
        self, inputs: dict[str, Tensor], tokens: int, streamer: Timed | None = None
    ) -> Any:
        # A cache of one size for all turns: one compiled step.
        return self._model.generate(
            **{name: tensor.to(DEVICE) for name, tensor in inputs.items()},
            **self._sampling,
            max_new_tokens=tokens,
            cache_implementation="static",
            max_cache_len=self._context,
            return_dict_in_generate=True,
            streamer=streamer,
        )

    def _within_context(self) -> dict[str, Tensor]:
        """The conversation as tokens, without its oldest questions and answers if need be."""
        while True:
            inputs = encoded(self._tokenizer, self.messages)
            if inputs["input_ids"].shape[1] + self._tokens <= self._context:
                return inputs
            if len(self.messages) == 1:
                self.messages.clear()
                raise ValueError("that is longer than the cache: see --context and --tokens")
            del self.messages[:2]


def lines(prompt: str | None) -> Iterator[str]:
    """What the user asks: ``prompt``, or lines of the standard input until it ends."""
    if prompt is not None:
        yield prompt
        return
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line:
            yield line


def main(
    arguments: Sequence[str] | None = None, show: Callable[[str], None] = print
) -> list[list[int]]:
    """The program; returns the tokens of each answer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", help="a folder of config.json, tokenizer and weights; a GGUF file")
    parser.add_argument("--prompt", help="ask this and end, instead of lines of standard input")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer (default: 256)")
    parser.add_argument("--context", type=int, default=2048, help="tokens kept (default: 2048)")
    parser.add_argument("--temperature", type=float, default=0, help="0 (default): the likeliest")
    kinds = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", default=kinds[0], choices=kinds, help="of what is not packed")
    parser.add_argument("--int4", action="store_true", help="weights of four bits, by torchao")
    given = parser.parse_args(arguments)
    if given.int4 and given.path.endswith(".gguf"):
        parser.error("--int4: the weights of a GGUF file are packed already")

    register()
    start = time.perf_counter()
    model, tokenizer = load(given.path, given.dtype, given.int4)
    synchronize()
    show(f"Loaded in {time.perf_counter() - start:.1f} s")
    copy_rate = copy_bytes_per_second(COPY_NBYTES)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
    if given.temperature > 0:
        sampling = {"do_sample": True, "temperature": given.temperature}
    chat = Chat(model, tokenizer, given.context, given.tokens, sampling, copy_rate)
    show(f"Compiled in {chat.compile():.1f} s; a copy reaches {copy_rate / 1e9:,.1f} GB/s")
    if os.environ.get("TORCH_CACHING_PRECOMPILE") == "1":
        torch.compiler.save_cache_artifacts()  # the next time nothing is compiled
    answers = []
    for line in lines(given.prompt):
        try:
            tokens, summary = chat.answer(line)
        except ValueError as error:
            show(f"{error}")
            continue
        answers.append(tokens)
        show(summary)
    return answers


if __name__ == "__main__":
    main()
