"""`transformers serve` and ``generate_batch`` on the device: what clients get, and what they undo.

The words of the tokenizer are one token each, so an answer says which tokens were generated.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.cli.serve import Serve
from transformers.generation.continuous_batching import continuous_api

from torch_webgpu_compile import counters
from torch_webgpu_compile.device.patches import continuous_batching

pytestmark = [pytest.mark.rotates(4)]

WORDS = 64
POSITIONS = 192
ROOM = 96  # tokens in the paged cache
SHORT = "w5 w6 w7"
LONG, OTHER = "w30 w33 w20 w8 " * 10, "w9 w10 w41 w22 w17 " * 7
CACHE = {"cb_block_size": 16, "cb_num_blocks": ROOM // 16, "cb_max_batch_tokens": 32}
MODES = {"sequential": {}, "continuous": {"continuous_batching": True, **CACHE}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights that seldom repeats itself, and a tokenizer of words."""
    folder = tmp_path_factory.mktemp("model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str, int], list[str]]:
    """The words that ``generate`` makes of a prompt on the CPU."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")

    def generate(prompt: str, count: int) -> list[str]:
        tokens = torch.tensor([ids(prompt)])
        made = model.generate(tokens, max_new_tokens=count, do_sample=False)
        return [f"w{token}" for token in made[0, tokens.shape[1] :].tolist()]

    return generate


def ids(prompt: str) -> list[int]:
    """The tokens of words."""
    return [int(word[1:]) for word in prompt.split()]


class Client:
    """A user of the package ``openai``."""

    def __init__(self, port: int, model: str, timeout: float = 100) -> None:
        self.port, self.model = port, model
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="-", timeout=timeout, max_retries=0
        )

    def ask(self, prompt: str, count: int, **options: Any) -> Any:
        """A chat completion, without drawing lots."""
        messages: Any = [{"role": "user", "content": prompt}]
        completions: Any = self.client.chat.completions
        return completions.create(
            model=self.model, messages=messages, max_tokens=count, temperature=0, **options
        )

    def words(self, prompt: str, count: int) -> list[str]:
        """The words of an answer that comes at once."""
        return str(self.ask(prompt, count).choices[0].message.content).split()

    def streamed(self, prompt: str, count: int) -> list[str]:
        """The words of an answer that comes in parts."""
        parts = self.ask(prompt, count, stream=True)
        return "".join(part.choices[0].delta.content or "" for part in parts).split()

    def health(self) -> int:
        """The status that the server has of itself."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health") as answer:
            return int(answer.status)


class InThread(Serve):  # type: ignore[misc]
    """A server that closes its loop of events."""

    def start_server(self) -> None:
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()


@contextlib.contextmanager
def serving(folder: Path, **options: Any) -> Iterator[tuple[Any, Client]]:
    """A server on the loopback interface, in this process, and a client of it."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port = asked.getsockname()[1]
    level = transformers.logging.get_verbosity()
    server: Any = InThread(
        force_model=str(folder),
        device="webgpu",
        dtype="float32",
        host="127.0.0.1",
        port=port,
        log_level="error",
        non_blocking=True,
        **options,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    try:
        while not server.server.started:
            time.sleep(0.01)
        yield server, Client(port, str(folder))
    finally:
        server.kill_server()
        transformers.logging.set_verbosity(level)


@pytest.fixture(scope="module", params=MODES)
def served(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Any, Client]]:
    """A server of each kind, that all tests use: each leaves it as it was."""
    with serving(folder, **MODES[request.param]) as (server, client):
        yield server, client


@pytest.fixture
def client(served: tuple[Any, Client]) -> Iterator[Client]:
    """A client; nothing that it makes the server do runs on the host."""
    counters.reset()
    yield served[1]
    assert not counters.fallbacks
    assert served[1].health() == 200


def test_completions(client: Client, expected: Callable[[str, int], list[str]]) -> None:
    answer = client.ask(SHORT, 12)
    assert answer.choices[0].message.content.split() == expected(SHORT, 12)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)
    assert client.streamed(SHORT, 12) == expected(SHORT, 12)


def test_clients_at_once(client: Client, expected: Callable[[str, int], list[str]]) -> None:
    """With continuous batching the cache has no room for both, so one of them waits for it."""
    other = Client(client.port, client.model)
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(client.streamed, LONG, 20), pool.submit(other.words, OTHER, 20)
        assert [answer.result() for answer in asked] == [expected(LONG, 20), expected(OTHER, 20)]


def test_clients_that_go_away(client: Client, expected: Callable[[str, int], list[str]]) -> None:
    client.words(SHORT, 5)
    counters.reset()
    assert client.words(SHORT, 5) == expected(SHORT, 5)
    usual = counters.dispatches
    stream = client.ask(OTHER, 80, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    counters.reset()
    assert client.words(SHORT, 5) == expected(SHORT, 5)
    assert counters.dispatches < 6 * usual  # 80 tokens are 16 times as many as 5
    with pytest.raises(openai.APITimeoutError):
        Client(client.port, client.model, timeout=0.02).words(OTHER, 20)
    assert client.words(SHORT, 5) == expected(SHORT, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(
    client: Client, expected: Callable[[str, int], list[str]], stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match="192 positions") as caught:
        client.ask("w9 " * POSITIONS, 5, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert client.words(SHORT, 5) == expected(SHORT, 5)


@pytest.mark.parametrize("served", ["continuous"], indirect=True)
def test_an_answer_that_the_cache_has_no_room_for(
    client: Client, expected: Callable[[str, int], list[str]]
) -> None:
    assert client.words(SHORT, 5) == expected(SHORT, 5)  # the cache is made for the first request
    with pytest.raises(openai.BadRequestError, match="room for 96"):
        client.ask("w9 " * ROOM, 5)
    with pytest.raises(openai.InternalServerError, match="room for, which is 96 tokens"):
        client.ask(LONG * 2, 40)
    with pytest.raises(openai.APIError) as caught:
        client.streamed(LONG * 2, 40)
    assert "room for, which is 96 tokens" in str(caught.value.body)
    assert client.words(SHORT, 5) == expected(SHORT, 5)


LOSS = """
import socket, sys, threading, time, urllib.request
import openai
import transformers.cli.transformers as cli
from transformers.cli.serving import utils
from transformers.generation.continuous_batching import continuous_api
from torch_webgpu_compile.runtime.device import opened_devices

folder = sys.argv[1]
left = 0


def losing(original):
    # The thread that uses the GPU loses it: another one's loss may end the process.
    def call(self, *arguments):
        global left
        left -= 1
        if left == 0:
            for device in opened_devices():
                device.backend.lib.wgpuDeviceDestroy(device.backend.device)
        return original(self, *arguments)

    return call


utils.DirectStreamer.put = losing(utils.DirectStreamer.put)
batches = continuous_api.ContinuousBatchProcessor
batches.update_batch = losing(batches.update_batch)


def serve(*options):
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port = str(asked.getsockname()[1])
    sys.argv = ["transformers", "serve", folder, "--device", "webgpu", "--dtype", "float32"]
    sys.argv += ["--host", "127.0.0.1", "--port", port, *options]
    server = threading.Thread(target=cli.main, daemon=True)
    server.start()
    while True:
        assert server.is_alive()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
            break
        except OSError:
            time.sleep(0.1)
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="-", timeout=100, max_retries=0
    )


def words(client):
    messages = [{"role": "user", "content": "w5 w6 w7"}]
    parts = client.chat.completions.create(
        model=folder, messages=messages, max_tokens=8, temperature=0, stream=True
    )
    return "".join(part.choices[0].delta.content or "" for part in parts)


def lose(client):
    global left
    left = 4
    try:
        words(client)
    except openai.APIError as error:
        assert "was lost" in str(error.body), (error, error.body)
    else:
        raise AssertionError("no error")
    print("answer", words(client), flush=True)


lose(serve())
lose(serve("--continuous-batching", "--cb-num-blocks", "2"))
"""


def test_a_lost_gpu(folder: Path, expected: Callable[[str, int], list[str]]) -> None:
    """Who waits for an answer gets an error; the next request is answered by another device."""
    done = subprocess.run(
        [sys.executable, "-c", LOSS, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    answers = [line[1:] for line in lines if line[:1] == ["answer"]]
    assert answers == [expected(SHORT, 8)] * 2


def test_generate_batch(folder: Path, expected: Callable[[str, int], list[str]]) -> None:
    """Called without numbers of blocks and tokens; what was compiled serves later calls."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", device_map="webgpu"
    )
    compiled = []
    for is_async in (False, False, True):
        counters.reset()
        made = model.generate_batch(
            [ids(SHORT), ids(OTHER)],
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                use_async_batching=is_async
            ),
            max_new_tokens=8,
        )
        compiled.append(counters.plans_compiled)
        words = [[f"w{token}" for token in answer.generated_tokens] for answer in made.values()]
        assert words == [expected(SHORT, 8), expected(OTHER, 8)]
        assert not counters.fallbacks
    assert compiled[1] == 0
    nbytes = torch.webgpu.get_device_properties().limits["max-storage-buffer-binding-size"]
    assert torch.webgpu.memory_allocated() < nbytes  # no cache nor mask is left


def test_a_gpu_with_less_memory_than_was_hoped_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache, and a batch's mask, are made once more, in half the size."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", device_map="webgpu"
    )
    make, sizes = continuous_api.PagedAttentionCache, []

    def make_second(**options: Any) -> Any:
        cache: Any = make(**options)
        sizes.append((cache.cache_tensor.nbytes, cache.max_batch_tokens, cache.max_tokens_read))
        if len(sizes) == 1:
            raise torch.OutOfMemoryError
        return cache

    monkeypatch.setattr(continuous_api, "PagedAttentionCache", make_second)
    model.init_continuous_batching()._create_batch_processor()
    limit = torch.webgpu.get_device_properties().limits["max-storage-buffer-binding-size"]
    assert len(sizes) == 2
    for (nbytes, tokens, room), most in zip(sizes, (limit, limit // 2), strict=True):
        assert most // 2 < max(nbytes, tokens * (tokens + room) * 4) <= most
        assert nbytes <= most


def test_memory_that_a_cache_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free of memory that is known, two bindings of other, and no more than is allowed."""
    breakdown = continuous_batching.memory_breakdown
    assert breakdown(lambda: "asked") == "asked"  # a cache on another device
    token = continuous_batching._index.set(0)
    try:
        device, total, _, taken = breakdown(None)
        assert device == torch.device("webgpu", 0)
        if torch.webgpu.get_device_properties().total_memory_is_known:
            assert total == torch.webgpu.mem_get_info()[1]
            assert 0 < total - taken < total
        monkeypatch.setattr(torch.webgpu, "mem_get_info", Mock(side_effect=NotImplementedError))
        _, total, reserved, taken = breakdown(None)
        nbytes = torch.webgpu.get_device_properties().limits["max-storage-buffer-binding-size"]
        assert total - max(reserved, taken) == 2 * (nbytes & ~3)
        try:
            limit = reserved + 4096
            torch.webgpu.set_memory_limit(limit)
            _, total, reserved, taken = breakdown(None)  # what other tests left may be freed by now
            assert total - max(reserved, taken) == limit - reserved
        finally:
            torch.webgpu.set_memory_limit(None)
    finally:
        continuous_batching._index.reset(token)
