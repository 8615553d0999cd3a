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
from .speech import speech_entries
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
    """Writes a bundle for ``torch-webgpu-image.js``, ``-text.js`` or ``-audio.js``.

        export_pipeline(model, AutoImageProcessor.from_pretrained(name), "site/model/")
        export_pipeline(model, AutoTokenizer.from_pretrained(name), "site/model/")
        export_pipeline(model, WhisperProcessor.from_pretrained(name), "site/model/")

    With an image processor, the bundle's entry ``forward`` takes a picture of any size up to 4096
    pixels, ``image``: uint8 (height, width, 4), resizes and normalizes it as the processor says,
    and gives the ``scores`` of the classes: float32 (classes,), a softmax, or sigmoids of a model
    of several labels.

    With a tokenizer, ``prefill`` and ``decode`` of a causal language model take ``ids``: int64
    (1, tokens), ``position``: int64 (tokens,), ``temperature`` and ``top_p``: float32, and
    ``top_k``: int64; they give the next ``token``: int64 (1, 1), drawn of at most 64 words, and its
    ``position``.

    With a processor of Whisper, ``listen`` takes ``samples``: float32 (samples,) of 30 seconds, and
    ``ids``: int64 (1, tokens) of what a text begins with (language and task); it gives the first
    ``token`` of the text and its ``position``, from which ``decode`` gives the next ones.

    What a tokenizer saves is in the bundle, with ``pipeline.json``.

    Args:
        model: of transformers, on any device; it is not changed.
        most_tokens: of a text with its beginning, which may have half of them; less where the model
            has fewer positions.
        runtime, keywords: see `export`: ``precision``, ``weights``, ``target``, ``name``.

    Returns:
        The folder.

    Raises:
        TypeError: the processor is of another kind.
        UnsupportedOp: the processor does something that kernels do not repeat, the tokenizer has no
            ``tokenizer.json``, or `export` refuses the model.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        if hasattr(processor, "image_mean"):
            name, (entries, about) = "torch-webgpu-image", _image(model, processor)
            files: dict[str, bytes] = {}
        elif hasattr(processor, "feature_extractor") and hasattr(processor, "tokenizer"):
            name, (entries, about) = "torch-webgpu-audio", _speech(model, processor)
            files = _tokenizer_files(processor.tokenizer)
        elif hasattr(processor, "save_pretrained") and hasattr(processor, "decode"):
            name, (entries, about) = "torch-webgpu-text", _text(model, processor, most_tokens)
            files = _tokenizer_files(processor)
        else:
            raise TypeError(
                "export_pipeline takes an image processor, a tokenizer, or Whisper's processor, "
                f"not {type(processor).__name__}; take a part of a processor, or export the model"
            )
        files[DESCRIPTION] = json.dumps(about, ensure_ascii=False, indent=1).encode()
        modules = (*RUNTIME, name) if runtime else ()
        return write_bundle(entries, path, files=files, modules=modules, **keywords)
    finally:
        for module, is_training in modes:
            module.training = is_training


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
    own = model.generation_config
    about = {
        "task": "text-generation",
        **size,
        "end": _ends(own),
        "chat_template": tokenizer.chat_template,
        "special": {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)},
        "sampling": {
            "temperature": (own.temperature or 1.0) if own.do_sample else 0.0,
            "topK": min(own.top_k or MOST_WORDS, MOST_WORDS),
            "topP": own.top_p or 1.0,
        },
    }
    return text_entries(model, **size), about


def _speech(model: Any, processor: Any) -> tuple[dict[str, EntryPoint], dict[str, Any]]:
    extractor, own = processor.feature_extractor, model.generation_config
    if getattr(model.config, "model_type", None) != "whisper":
        raise UnsupportedOp(
            f"export_pipeline with {type(processor).__name__}",
            f"{type(model).__name__} is not Whisper's",
            "export the model, with what its processor makes as its inputs",
        )
    begin = [model.config.decoder_start_token_id]
    # By code: the tokens are called as ``<|en|>``.
    languages = {k.strip("<|>"): v for k, v in (getattr(own, "lang_to_id", None) or {}).items()}
    tasks = dict(getattr(own, "task_to_id", None) or {}) if languages else {}
    language = (getattr(own, "language", None) or "en").strip("<|>") if languages else ""
    if languages:
        begin += [languages.get(language, next(iter(languages.values()))), tasks["transcribe"]]
    if (silent := getattr(own, "no_timestamps_token_id", None)) is not None:
        begin.append(silent)
    length = model.config.max_target_positions
    about = {
        "task": "automatic-speech-recognition",
        "rate": extractor.sampling_rate,
        "samples": extractor.n_samples,
        "length": length,
        "begin": begin,
        "end": _ends(own),
        "language": language,
        "languages": languages,
        "tasks": tasks,
    }
    return speech_entries(model, extractor, len(begin), length, own), about


def _ends(config: Any) -> list[int]:
    """The tokens that end a text."""
    ends = config.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


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
