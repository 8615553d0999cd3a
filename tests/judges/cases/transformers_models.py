"""transformers' ``ModelTesterMixin`` over small models of several kinds.

The source package on the registry has the mixin, but no model's own tests: the configurations
are this file's.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.testing_utils import torch_device

from tests import test_modeling_common as common  # type: ignore[attr-defined]

_VOCABULARY = 99
_SMALL = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "image_size": 30,
    "patch_size": 2,
}
_STAGES = {"hidden_sizes": [10, 20, 30, 40], "depths": [1, 1, 2, 1], "image_size": 32}
_MAMBA = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_T5 = {
    "vocab_size": _VOCABULARY,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 4,
    "d_ff": 37,
    "d_kv": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def _ids() -> dict[str, torch.Tensor]:
    return {"input_ids": common.ids_tensor([3, 7], _VOCABULARY)}


def _text() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 7, dtype=torch.long, device=torch_device)
    return {**_ids(), "attention_mask": mask}


def _both_texts() -> dict[str, torch.Tensor]:
    return {**_text(), **{f"decoder_{name}": value for name, value in _text().items()}}


def _image(size: int = 30) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(3, 3, size, size, device=torch_device)}


@dataclass(frozen=True)
class _Case:
    """`names` are of the configuration and of what is tested of the model, without the prefix."""

    names: tuple[str, ...]
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]] = _text
    has_attentions: bool = True
    is_encoder_decoder: bool = False


_DECODER = ("Model", "ForCausalLM")
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_CASES = {
    "Llama": _Case((*_DECODER, "ForSequenceClassification"), _GROUPED),
    "Bert": _Case(("Model", "ForMaskedLM", "ForSequenceClassification"), _SMALL),
    "GPT2": _Case(("Model", "LMHeadModel"), _SMALL),
    "ViT": _Case(("Model", "ForImageClassification"), _VISION, _image),
    "Qwen2Moe": _Case(_DECODER, {**_GROUPED, **_EXPERTS}),
    "Gemma2": _Case(_DECODER, {**_GROUPED, "head_dim": 8, "sliding_window": 8}),
    "ConvNext": _Case(("Model", "ForImageClassification"), _STAGES, lambda: _image(32), False),
    "Mamba": _Case(_DECODER, _MAMBA, _ids, False),
    "T5": _Case(("Model", "ForConditionalGeneration"), _T5, _both_texts, is_encoder_decoder=True),
}


class _Tester:
    """What the mixin asks a model's tests for."""

    is_training = True
    batch_size, seq_length = 3, 7

    def __init__(self, name: str) -> None:
        self._name, self._case = name, _CASES[name]

    def get_config(self) -> Any:
        return getattr(transformers, f"{self._name}Config")(**self._case.settings)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        return self.get_config(), self._case.inputs()

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


def _class(name: str, case: _Case) -> type:
    def set_up(self: Any) -> None:
        self.model_tester = _Tester(name)

    members = {
        "setUp": set_up,
        "all_model_classes": tuple(getattr(transformers, name + part) for part in case.names),
        "has_attentions": case.has_attentions,
        "is_encoder_decoder": case.is_encoder_decoder,
        "__module__": __name__,
    }
    return type(f"Test{name}", (common.ModelTesterMixin, unittest.TestCase), members)


for _name, _case in _CASES.items():
    globals()[f"Test{_name}"] = _class(_name, _case)
