"""`examples/chat.py` with a small model in a folder that the test writes."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples import chat
from tests.models import test_gguf

pytestmark = [pytest.mark.rotates(4), pytest.mark.usefixtures("fresh")]

_TEXTS = ("The cat sleeps on the warm windowsill.", "A kitten naps in the sun.", "Rates rose.")
_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer trained on a few sentences and a Llama with random weights."""
    folder = tmp_path_factory.mktemp("model")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trained.train_from_iterator(
        _TEXTS,
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=special),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def expected(folder: Path, text: str, tokens: int, is_quantized: bool = False) -> list[int]:
    """What ``generate`` gives on the CPU."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    if is_quantized:
        chat.quantize(model)
    inputs = tokenizer(text, return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return made[0, inputs["input_ids"].shape[1] :].tolist()


def test_a_conversation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chat, "COPY_NBYTES", 1 << 20)
    monkeypatch.setattr("sys.stdin", io.StringIO("A kitten\n\nThe cat\n"))
    options = ["--dtype", "float32", "--tokens", "12", "--context", "128"]
    first, second = chat.main([str(folder), *options])
    assert first == expected(folder, "<s>user: A kitten\n<s>assistant:", 12)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    told = tokenizer.decode(first, skip_special_tokens=True)
    conversation = f"<s>user: A kitten\n<s>assistant: {told}\n<s>user: The cat\n<s>assistant:"
    assert second == expected(folder, conversation, 12)
    printed = capsys.readouterr().out
    assert told.strip() in printed
    summaries = [line for line in printed.splitlines() if line.endswith("of a copy]")]
    assert len(summaries) == 2
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    weights = sum(p.nbytes for p in model.parameters()) - model.model.embed_tokens.weight.nbytes
    assert f"{weights / 1e6:,.1f} MB per token" in summaries[0]  # the cache is 6 kB


def test_weights_of_four_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "COPY_NBYTES", 1 << 20)
    options = ["--dtype", "float32", "--tokens", "8", "--context", "64", "--prompt", "A kitten"]
    (answer,) = chat.main([str(folder), "--int4", *options])
    assert answer == expected(folder, "<s>user: A kitten\n<s>assistant:", 8, is_quantized=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    whole = chat.weight_nbytes(model)
    chat.quantize(model)
    # Half a byte of four, and two numbers of four bytes for 32 weights; the norms are as they were.
    assert chat.weight_nbytes(model) < whole / 5


def test_a_tokenizer_without_a_template(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    messages = [{"role": "user", "content": text} for text in ("A kitten", "The cat")]
    ids = chat.encoded(tokenizer, messages)["input_ids"][0]
    assert tokenizer.decode(ids) == "A kitten\nThe cat"


def test_interrupted_answers_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C at the third token ends the answer, not the conversation."""
    monkeypatch.setattr(chat, "COPY_NBYTES", 1 << 20)
    monkeypatch.setattr("sys.stdin", io.StringIO("A kitten\nThe cat\n"))
    put, handler = chat.Timed.put, signal.getsignal(signal.SIGINT)

    def interrupt(self: chat.Timed, value: torch.Tensor) -> None:
        put(self, value)
        if len(self.tokens) == 3 and len(answers) == 0:
            answers.append(self.tokens)
            signal.raise_signal(signal.SIGINT)

    answers: list[list[int]] = []
    monkeypatch.setattr(chat.Timed, "put", interrupt)
    options = ["--dtype", "float32", "--tokens", "12", "--context", "128"]
    first, second = chat.main([str(folder), *options])
    assert first == expected(folder, "<s>user: A kitten\n<s>assistant:", 12)[:3]
    told = transformers.AutoTokenizer.from_pretrained(folder).decode(first)
    conversation = f"<s>user: A kitten\n<s>assistant: {told}\n<s>user: The cat\n<s>assistant:"
    assert second == expected(folder, conversation, 12)
    assert "[stopped after 3 tokens]" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "COPY_NBYTES", 1 << 20)
    path = tmp_path / "model.gguf"
    test_gguf.write(path, "llama", kind=lambda name: "Q8_0")
    options = ["--dtype", "float32", "--tokens", "5", "--context", "64", "--prompt", "hello there"]
    (answer,) = chat.main([str(path), *options])
    given = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, **given)
    inputs = chat.encoded(tokenizer, [{"role": "user", "content": "hello there"}])
    assert inputs["input_ids"].shape[1] > 1
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **given)
    tokens = plain.generate(**inputs, max_new_tokens=5, do_sample=False)[0]
    assert answer == tokens[inputs["input_ids"].shape[1] :].tolist()
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(SystemExit, match="it is damaged or incomplete"):
        chat.main([str(path)])


def test_what_is_not_a_model_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="is not a language model that can be loaded"):
        chat.main([str(tmp_path)])
    with pytest.raises(SystemExit):
        chat.main([str(tmp_path), "--dtype", "float17"])
    assert "invalid choice: 'float17'" in capsys.readouterr().err
