"""GGUF files of tiny models, as llama.cpp's converter writes them."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf as writing
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from torch_webgpu_compile.torch_ops import gguf

HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
"""The bytes of a block at which its half floats begin."""


def random_blocks(name: str, rows: int, columns: int, scale: float = 1.0, seed: int = 0) -> Any:
    """uint8 (rows, bytes of a row): any bits, but for the scales, which are at most ``scale``."""
    form, generator = gguf.FORMATS[name], np.random.default_rng(seed)
    sizes = rows, columns // form.block, form.nbytes
    blocks = generator.integers(0, 256, sizes, dtype=np.uint8)
    for start in HALVES[name]:
        halves = generator.uniform(-scale, scale, (*sizes[:2], 1)).astype(np.float16)
        blocks[..., start : start + 2] = halves.view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = generator.integers(110, 130, sizes[:2]) + int(np.log2(scale))
    return blocks.reshape(rows, -1)


def dequantized(blocks: Any, name: str) -> Any:
    """float32, by the package ``gguf``."""
    return writing.quants.dequantize(blocks, GGMLQuantizationType[name])


def write_model(
    path: Path,
    model: Any,
    architecture: str,
    keys: Mapping[str, Any],
    kind: Callable[[str], str],
    change: Callable[[str, torch.Tensor], torch.Tensor],
    further: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes a model.

    Args:
        keys: metadata, without the name of the architecture in front.
        kind: the format of a tensor, by its name in the file; one-dimensional ones are floats.
        change: what llama.cpp's converter does to a tensor, by its name in the file.
        further: tensors that the model has not.
    """
    config = model.config
    writer = writing.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](f"{architecture}.{key}", value)
    tokens = ["<unk>", "<s>", "</s>", "▁", *string.ascii_letters]
    tokens += [f"<{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_pad_token_id(0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[1] * (len(tokens) - 3)])
    names = writing.get_tensor_name_map(
        next(k for k, v in writing.MODEL_ARCH_NAMES.items() if v == architecture),
        config.num_hidden_layers,
    )
    tensors = pieces(model.state_dict(), names) | dict(further or {})
    for number, (name, tensor) in enumerate(tensors.items()):
        tensor = change(name, tensor.float())
        wanted = "F32" if tensor.dim() == 1 else kind(name)
        if wanted in ("F32", "F16", "BF16"):
            data = writing.quants.quantize(tensor.numpy(), GGMLQuantizationType[wanted])
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[wanted])
            continue
        try:
            data = writing.quants.quantize(tensor.numpy(), GGMLQuantizationType[wanted])
        except NotImplementedError:  # the package only reads it
            rows = tensor.numel() // tensor.shape[-1]
            data = random_blocks(wanted, rows, tensor.shape[-1], 2e-3, number)
            data = data.reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[wanted])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pieces(state: Mapping[str, torch.Tensor], names: Any) -> dict[str, torch.Tensor]:
    """Tensors by their names in the file, gates of experts and their factors apart."""
    found = {}
    for name, tensor in state.items():
        if any(other.data_ptr() == tensor.data_ptr() for other in found.values()):
            continue  # tied
        stem, _, suffix = name.rpartition(".")
        if suffix == "gate_up_proj":
            block = names.get_name(f"{stem}.down_proj").removesuffix("ffn_down_exps")
            gate, up = tensor.chunk(2, 1)
            found |= {f"{block}ffn_gate_exps.weight": gate, f"{block}ffn_up_exps.weight": up}
        elif suffix == "down_proj":
            found[f"{names.get_name(name)}.weight"] = tensor
        else:
            found[f"{names.get_name(stem)}.{suffix}"] = tensor
    return found
