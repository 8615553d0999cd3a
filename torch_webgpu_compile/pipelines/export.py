"""`export_pipeline`: a model of transformers with its processor, for a page's five lines."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from ..errors import UnsupportedOp
from ..exports.export import RUNTIME, EntryPoint, write_bundle
from .images import MOST_PIXELS, image_steps
from .text import MOST_WORDS, lengths, text_entries

DESCRIPTION = "pipeline.json"
"""What a page's pipeline has to know, beside the bundle's manifest."""

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def export_pipeline(
    model: Any,
    processor: Any,
    path: str | os.PathLike[str],
    *,
    most_tokens: int = 1024,
    runtime: bool = True,
    **keywords: Any,
) -> Path:
    """Writes a bundle for ``torch-webgpu-image.js`` or ``torch-webgpu-text.js``.

        export_pipeline(model, AutoImageProcessor.from_pretrained(name), "site/model/")
        export_pipeline(model, AutoTokenizer.from_pretrained(name), "site/model/")

    With an image processor, the bundle's entry ``forward`` takes a picture of any size up to 4096
    pixels, ``image``: uint8 (height, width, 4), resizes and normalizes it as the processor says,
    and gives the ``scores`` of the classes: float32 (classes,), a softmax, or sigmoids of a model
    of several labels.

    With a tokenizer, ``prefill`` and ``decode`` of a causal language model take ``ids``: int64
    (1, tokens), ``position``: int64 (tokens,), ``temperature`` and ``top_p``: float32, and
    ``top_k``: int64; they give the next ``token``: int64 (1, 1), drawn of at most 64 words, and its
    ``position``. The tokenizer's files lie beside the bundle.

    Args:
        model: of transformers, on any device; it is not changed.
        most_tokens: of a text with its beginning; less where the model has fewer positions.
        runtime, keywords: see `export`: ``precision``, ``weights``, ``target``, ``name``.

    Returns:
        The folder.

    Raises:
        TypeError: the processor is neither an image processor nor a tokenizer.
        UnsupportedOp: the processor does something that kernels do not repeat, the tokenizer has no
            ``tokenizer.json``, or `export` refuses the model.
    """
    is_training = model.training
    model.eval()
    try:
        if hasattr(processor, "image_mean"):
            module, (entries, about) = "torch-webgpu-image", _image(model, processor)
            files: dict[str, bytes] = {}
        elif hasattr(processor, "save_pretrained") and hasattr(processor, "decode"):
            module, (entries, about) = "torch-webgpu-text", _text(model, processor, most_tokens)
            files = _tokenizer_files(processor)
        else:
            raise TypeError(
                "export_pipeline takes an image processor or a tokenizer of transformers, not "
                f"{type(processor).__name__}; take that part of a processor, or export the model"
            )
        files[DESCRIPTION] = json.dumps(about, ensure_ascii=False, indent=1).encode()
        modules = (*RUNTIME, module) if runtime else ()
        return write_bundle(entries, path, files=files, modules=modules, **keywords)
    finally:
        model.train(is_training)


def _image(model: Any, processor: Any) -> tuple[dict[str, EntryPoint], dict[str, Any]]:
    steps, config = image_steps(processor), model.config
    several = getattr(config, "problem_type", None) == "multi_label_classification"

    def forward(image: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            logits: Tensor = model(pixel_values=steps(image).to(model.dtype)).logits
        logits = logits[0].float()
        return {"scores": logits.sigmoid() if several else logits.softmax(-1)}

    sides = {k: Dim(side, min=2, max=MOST_PIXELS) for k, side in enumerate(("height", "width"))}
    example: Any = torch.zeros((301, 257, 4), dtype=torch.uint8, device=model.device)
    labels: Any = config.id2label
    about = {
        "task": "image-classification",
        "most_pixels": MOST_PIXELS,
        "labels": [str(labels[k]) for k in sorted(labels)],
    }
    return {"forward": EntryPoint(forward, (example,), None, (sides,))}, about


def _text(
    model: Any, tokenizer: Any, most_tokens: int
) -> tuple[dict[str, EntryPoint], dict[str, Any]]:
    size = lengths(model.config.get_text_config(), most_tokens)
    ends = model.generation_config.eos_token_id
    own = model.generation_config
    about = {
        "task": "text-generation",
        **size,
        "end": ends if isinstance(ends, list) else [] if ends is None else [ends],
        "chat_template": tokenizer.chat_template,
        "special": {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)},
        "sampling": {
            "temperature": (own.temperature or 1.0) if own.do_sample else 0.0,
            "topK": min(own.top_k or MOST_WORDS, MOST_WORDS),
            "topP": own.top_p or 1.0,
        },
    }
    return text_entries(model, **size), about


def _tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {name: Path(folder, name) for name in _TOKENIZER}
        if missing := [name for name, path in files.items() if not path.exists()]:
            raise UnsupportedOp(
                f"export_pipeline with {type(tokenizer).__name__}",
                f"it saves no {' and no '.join(missing)}",
                "load it with AutoTokenizer.from_pretrained(…, use_fast=True)",
            )
        return {name: path.read_bytes() for name, path in files.items()}
