"""Models at their real sizes, with fewer layers where all are alike: what replays compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import CASES
from tests.small_models import MODELS

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def _encoder(name: str, **settings: Any) -> Callable[[], Case]:
    def build() -> Case:
        import transformers

        config = getattr(transformers, f"{name}Config")(num_hidden_layers=2, **settings)
        return getattr(transformers, f"{name}Model")(config), (torch.randint(0, 99, (8, 128)),)

    return build


def _language_model(name: str, rows: int, columns: int, **settings: Any) -> Callable[[], Case]:
    def build() -> Case:
        import transformers

        config = getattr(transformers, f"{name}Config")(**settings)
        model = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")

        class Logits(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model(config)

            def forward(self, tokens: Tensor) -> Tensor:
                return self.model(tokens, use_cache=False).logits

        return Logits(), (torch.randint(0, 99, (rows, columns)),)

    return build


def _mixed() -> Case:
    """Operators of every family besides those of models."""

    def function(x: Tensor, y: Tensor, i: Tensor) -> Any:
        scores = torch.softmax(x @ y.mT, -1).cumsum(-1)
        rows = torch.zeros_like(x).index_add(0, i, y[i]).sort(-1).values
        windows = torch.nn.functional.unfold(x[None, None], 3).std(1)
        wave = torch.fft.rfft(x).abs() + torch.special.erfinv(y[:, :33] / 9)
        whole = (i * (1 << 33)) // 7 + i.cumsum(0)
        return scores, rows, windows, wave, whole, x.half() + y.half(), (x > y).any(0), x.argmax(1)

    return function, (torch.ones(48, 64), torch.ones(48, 64), torch.arange(48))


_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
}
_GPT2 = {"n_layer": 2, "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0, "embd_pdrop": 0}
_SMALL = ("vit", "whisper", "unet", "lstm", "convnet")

INFERENCE: dict[str, Callable[[], Case]] = {
    **{name: lambda case=case: case.build(False) for name, case in CASES.items()},
    **{f"small_{name}": MODELS[name] for name in _SMALL},
    "gpt2": _language_model("GPT2", 1, 512, **_GPT2),
    "llama": _language_model("Llama", 1, 512, **_LLAMA),
    "qwen2": _language_model("Qwen2", 4, 128, **_LLAMA),
    "bert": _encoder("Bert"),
    "mixed": _mixed,
}
for _name in ("dispatch_chain",):
    INFERENCE.pop(_name)
TRAINING: dict[str, Callable[[], Case]] = {
    **{f"small_{name}": MODELS[name] for name in _SMALL},
    "gpt2": _language_model("GPT2", 4, 256, **_GPT2, attn_pdrop=0),
    "llama": _language_model("Llama", 1, 512, **_LLAMA),
    "bert": _encoder("Bert"),
    "resnet50": INFERENCE["resnet50"],
    "mlp": INFERENCE["mlp"],
}
HALF = {name: INFERENCE[name] for name in ("gpt2", "llama", "resnet50")}
DYNAMIC = {name: INFERENCE[name] for name in ("gpt2", "llama", "mixed", "mlp", "small_convnet")}
