"""`transformers`: a model of a GGUF file keeps its weights packed on the device.

Patched: when they are imported, ``AUTO_QUANTIZER_MAPPING["gguf"]`` of
``transformers.quantizers.auto``, the tables of formats in
``transformers.integrations.gguf.dequant``, and ``load_gguf_checkpoint`` in
``transformers.modeling_gguf_pytorch_utils``. Tried with transformers 5.24; where a version has no
such things, nothing is changed. What is loaded to other devices is loaded as before.

Why: transformers keeps blocks packed where a kernel for the device is published on its hub, and
for three architectures; else it dequantizes the whole model, on the host. It takes no file with
Q5_0, Q5_1 or MXFP4 for those three, packs no embedding that is scaled (Gemma's), and takes the
output for packed like the embedding also where the file has one that is not. It leaves out the
factors of a Llama 3's rotary embedding, which are a tensor of the file. It reads the vocabulary
anew for the configuration, for the tokenizer and for the model.

Until: a kernel for another device can be registered, and the table of architectures has those that
the loader which dequantizes has.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...tensors import devices
from ..import_hooks import after_import, around
from .accelerator import is_wanted


def install() -> None:
    """Has ``from_pretrained`` load GGUF files by `_quantizer`, once ``transformers`` is there."""
    after_import("transformers.integrations.gguf.dequant", _add_formats)
    after_import("transformers.quantizers.auto", _take_files)


_FORMATS = {"Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "MXFP4": (39, 32, 17)}
"""Those that files have and the tables have not: number, elements of a block, and its bytes."""


def _add_formats(module: Any) -> None:
    for name, (number, *block) in _FORMATS.items():
        if number not in module.GGML_BLOCK:
            module.GGML_BLOCK[number] = tuple(block)
            module.GGML_NAME[number] = name
            module._DEQUANT[number] = partial(_dequantize, number, block[0])


def _dequantize(ggml_type: int, columns: int, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """A file's blocks, (blocks, bytes of one), where they are not packed, also on the CPU."""
    from ...torch_ops import gguf

    return gguf.dequantized(gguf.pack(blocks, ggml_type), ggml_type, columns).to(dtype)


def _take_files(module: Any) -> None:
    theirs = module.AUTO_QUANTIZER_MAPPING.get("gguf")
    if hasattr(theirs, "read_header"):
        module.AUTO_QUANTIZER_MAPPING["gguf"] = _quantizer(theirs)


_CHOICES = "auto", "balanced", "balanced_low_0", "sequential"


def _is_here(device_map: Any) -> bool:
    """Whether a device map has the device, or leaves the choice to `accelerate`, which takes it."""
    if isinstance(device_map, str) and device_map in _CHOICES:
        return is_wanted()
    places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    return any(_is_device(place) for place in places)


def _is_device(place: Any) -> bool:
    if isinstance(place, int) and not isinstance(place, bool):
        return is_wanted()
    return place not in (None, "disk") and torch.device(place).type == devices.NAME


def _quantizer(theirs: Any) -> Any:
    """transformers' ``GgufHfQuantizer``, with our modules for what is loaded to the device."""
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.gguf import utils
    from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

    class Quantizer(theirs):  # type: ignore[misc]
        """``GgufHfQuantizer``."""

        is_here = False
        is_ours = False  # an architecture of which transformers would dequantize all
        supported: bool
        header: Any
        factors: Tensor | None = None

        def validate_environment(self, *rest: Any, **keywords: Any) -> None:
            self.is_here = self.is_here or _is_here(keywords.get("device_map"))
            if not (self.is_here and self.supported):
                super().validate_environment(*rest, **keywords)
            elif not self.header.has_quantized_weights:
                self.quantization_config.dequantize = True

        def read_header(self, gguf_file: str) -> None:
            super().read_header(gguf_file)
            if self.is_here and not self.supported:
                metadata, _ = read_gguf_metadata(gguf_file)
                if _is_known(metadata["general.architecture"]):
                    with suppress(ValueError):  # a format that the package `gguf` dequantizes
                        self.header = GgufHeader.from_file(gguf_file)
                        self.supported = self.is_ours = True
                        self.validate_environment()
            if self.is_here and self.supported:
                _check_length(self.header)

        def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
            if not (self.is_here and self.supported):
                return super().update_dtype(dtype)  # type: ignore[no-any-return]
            self.dtype = dtype or self.header.dtype or torch.float32
            return self.dtype

        def _process_model_before_weight_loading(self, model: Any, **keywords: Any) -> None:
            if not (self.is_here and self.supported):
                super()._process_model_before_weight_loading(model, **keywords)
                return
            is_tied = all(info.name != "output.weight" for info in self.header.tensors)
            architecture = self.header.architecture
            if self.is_ours:
                self.header, self.factors = _named(self.header, architecture, model)
                self.mapping = [*_converters(architecture, model.config)]
            else:
                self.mapping = utils.get_gguf_conversion_mapping(architecture, model.config)
            plan = utils.get_gguf_plan(self.header, self.mapping)
            self.quantized, packable, self.input_permutations = plan
            if not self.quantization_config.dequantize:
                self.packed_modules = _replace(model, packable, is_tied, self.dtype)

        def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
            found = super().update_weight_conversions(weight_conversions, model)
            if self.is_here and self.supported and self.packed_modules:
                packing = _packing(
                    {
                        name: self.quantized[name]
                        for name in self.packed_modules
                        if name in self.quantized
                    }
                )
                for conversion in found:
                    if isinstance(conversion, WeightConverter):
                        conversion.operations.append(packing)
            return found

        def _process_model_after_weight_loading(self, model: Any, **keywords: Any) -> Any:
            if not (self.is_here and self.supported):
                return super()._process_model_after_weight_loading(model, **keywords)
            for name, module in self.packed_modules.items():
                permutation = self.input_permutations.get(name)
                if permutation is not None:
                    module.input_permutation = permutation.to(module.weight.device)
            if self.factors is not None:
                _scale_rotations(model, self.factors)
            model._weight_conversions = None
            return model

    return Quantizer


def _packing(kinds: Mapping[str, int]) -> Any:
    """The last conversion of tensors: blocks of these formats, by a weight's name, are packed."""
    from transformers.core_model_loading import ConversionOps

    from ...torch_ops import gguf

    class Pack(ConversionOps):
        """Packs one tensor where it is."""

        @torch.no_grad()
        def convert(
            self,
            input_dict: dict[str, Any],
            source_patterns: list[str],
            target_patterns: list[str],
            **keywords: Any,
        ) -> Any:
            name = keywords.get("full_layer_name", "")
            if name not in kinds:
                return input_dict
            (given,) = input_dict.values()
            blocks = given[0] if isinstance(given, list) else given
            return {name: gguf.pack(blocks, kinds[name])}

    return Pack()


def _replace(
    model: Any, plan: Mapping[str, int], is_tied: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """Puts packed modules where weights may stay packed.

    Args:
        plan: the formats of those weights, by their names.
        is_tied: whether the file has no output of its own.

    Returns:
        The modules by the names of their weights.
    """
    from ...torch_ops import gguf
    from ..packed_modules import PackedEmbedding, PackedExperts, PackedLinear

    plan = {name: kind for name, kind in plan.items() if kind in gguf.BY_NUMBER}
    replaced: dict[str, Any] = {}

    def put(name: str, module: nn.Module, *weights: str) -> None:
        model.set_submodule(name, module)
        replaced.update({f"{name}.{weight}": module for weight in weights})

    def put_plain(name: str, module: Any, kind: int) -> None:
        if type(module) is nn.Linear:
            sizes = module.in_features, module.out_features
            put(name, PackedLinear(*sizes, kind, module.bias is not None), "weight")
        elif isinstance(module, nn.Embedding) and (scale := _scale_of(module)) is not None:
            sizes = module.num_embeddings, module.embedding_dim
            put(name, PackedEmbedding(*sizes, kind, dtype, scale), "weight")

    for name, module in [*model.named_modules()]:
        kind = plan.get(f"{name}.weight")
        gate_up, down = (plan.get(f"{name}.{weight}") for weight in _OF_EXPERTS)
        if kind is not None:
            put_plain(name, module, kind)
        elif gate_up is not None and down is not None and name.endswith(".experts"):
            put(name, PackedExperts(module, gate_up, down), *_OF_EXPERTS)
    ties = getattr(model, "_tied_weights_keys", None) or {}
    for target, source in (ties if is_tied and isinstance(ties, Mapping) else {}).items():
        if source in replaced and target not in replaced:
            name = target.removesuffix(".weight")
            put_plain(name, model.get_submodule(name), plan[source])
    return replaced


_OF_EXPERTS = "gate_up_proj", "down_proj"


def _scale_of(module: nn.Embedding) -> float | None:
    """What an embedding's rows are multiplied with; None for a kind that is not known."""
    if type(module) is nn.Embedding:
        return 1.0
    scale = getattr(module, "scalar_embed_scale", getattr(module, "embed_scale", None))
    return float(scale) if isinstance(scale, (int, float)) else None


_read: dict[tuple[Any, ...], Any] = {}
"""What was read last of a file without its tensors, by its path, size and time."""


@around("transformers.modeling_gguf_pytorch_utils:load_gguf_checkpoint")
def load_checkpoint(
    original: Any, gguf_checkpoint_path: str, return_tensors: bool = False, **keywords: Any
) -> Any:
    """Reads a file's metadata once for configuration, tokenizer and model, and says if it is short.

    The package ``gguf`` takes seconds for a vocabulary of 128,000 words.
    """
    status = os.stat(gguf_checkpoint_path)
    key = os.path.abspath(gguf_checkpoint_path), status.st_size, status.st_mtime_ns
    if not return_tensors and key in _read:
        return copy.deepcopy(_read[key])
    try:
        found = original(gguf_checkpoint_path, return_tensors, **keywords)
    except ValueError:
        from transformers.integrations.gguf.reader import GgufHeader

        _check_length(GgufHeader.from_file(gguf_checkpoint_path))
        raise
    if not return_tensors:
        _read.clear()
        _read[key] = copy.deepcopy(found)
    return found


def _check_length(header: Any) -> None:
    """Raises ValueError for a file that is shorter than its header says."""
    nbytes = os.path.getsize(header.path)
    end = header.data_start + max((info.offset + info.nbytes for info in header.tensors), default=0)
    if nbytes < end:
        raise ValueError(
            f"{header.path} ends at byte {nbytes:,}, but its tensors at {end:,}: it is damaged or "
            "incomplete, so download it again"
        )


# -- architectures ---------------------------------------------------------------------------------

# By transformers' processor of tensors: what is done to those of them that are not only renamed.
_Converters = Callable[[Any], Iterator[Any]]


def _of_llama(config: Any) -> Iterator[Any]:
    """Rows of queries and keys, whose pairs llama.cpp has side by side."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    for name, count in (("q", heads), ("k", config.num_key_value_heads)):
        rows = torch.arange(count * size, device="cpu").view(count, size // 2, 2).mT.flatten()
        for part in ("weight", "bias"):
            yield _converter(rf"self_attn\.{name}_proj\.{part}$", "PermuteRows", rows)


def _of_norms(config: Any) -> Iterator[Any]:
    """Weights of norms, to which llama.cpp has added 1."""
    yield _converter(r"norm\.weight$", "SubtractOne")


def _of_experts(config: Any) -> Iterator[Any]:
    """Gates of experts and what they are multiplied with, which a file has in two tensors."""
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.gguf.gguf_conversion_mapping import ConcatenateRows

    sources = [r"\.experts\.ffn_gate_exps$", r"\.experts\.ffn_up_exps$"]
    yield WeightConverter(sources, ".experts.gate_up_proj", [ConcatenateRows(dim=1)])
    yield _converter(r"mlp\.shared_expert_gate\.weight$", "Unsqueeze", 0, expected_ndim=2)


_OPERATIONS: dict[str, _Converters] = {
    "TensorProcessor": lambda config: iter(()),
    "LlamaTensorProcessor": _of_llama,
    "Gemma2TensorProcessor": _of_norms,
    "NemotronTensorProcessor": _of_norms,
    "Qwen2MoeTensorProcessor": _of_experts,
}


def _converter(pattern: str, operation: str, *arguments: Any, **keywords: Any) -> Any:
    """A conversion of the tensors whose name ends like this, which keep their name."""
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.gguf import gguf_conversion_mapping as operations

    made = getattr(operations, operation)(*arguments, **keywords)
    return WeightConverter(f"({pattern.removesuffix('$')})$", r"\1", [made])


def _processor(architecture: str) -> Any:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)


def _is_known(architecture: str) -> bool:
    """Whether all of an architecture's conversions are `_OPERATIONS`.

    Those of GPT-OSS' experts have no processor under the name that files have.
    """
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    own = architecture in GGUF_SUPPORTED_ARCHITECTURES and architecture != "gpt-oss"
    kind = _processor(architecture).__name__
    return kind in _OPERATIONS and (own or kind != "TensorProcessor")


def _converters(architecture: str, config: Any) -> Iterator[Any]:
    return _OPERATIONS[_processor(architecture).__name__](config)


def _named(header: Any, architecture: str, model: Any) -> tuple[Any, Tensor | None]:
    """The header with the model's names of its tensors, and the factors of rotations.

    Tensors that the model has not are left out.
    """
    from transformers.integrations.gguf.reader import load_gguf_state_dict
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    processor = _processor(architecture)(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    tensors, factors = [], None
    for info in header.tensors:
        plain = info.name.removesuffix(".weight")
        name = names.get(info.name, names.get(plain))
        if plain == "rope_freqs":
            factors = load_gguf_state_dict(header._replace(tensors=(info,)))[info.name][...]
        if name is None:
            continue
        if name.endswith(".experts.gate_up_proj"):  # of two tensors
            name = re.sub("gate_up_proj$", plain.rpartition(".")[2], name)
        tensors.append(info._replace(name=name))
    return header._replace(tensors=tuple(tensors)), factors


def _scale_rotations(model: Any, factors: Tensor) -> None:
    """Divides the frequencies of rotary embeddings by a file's factors, as llama.cpp does.

    They are those of a Llama 3 whose context was made longer, of which nothing else in the file
    tells.
    """
    for module in model.modules():
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, Tensor) and frequencies.shape == factors.shape:
            for name in ("inv_freq", "original_inv_freq"):
                found = getattr(module, name, None)
                if isinstance(found, Tensor):
                    setattr(module, name, found / factors.to(found))
