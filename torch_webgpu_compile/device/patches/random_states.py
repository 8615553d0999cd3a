"""Checkpoints of training tools keep the device's random numbers, with those of the CPU.

Patched: when they are imported, ``Trainer._save_rng_state`` and ``_load_rng_state`` of
``transformers.trainer``, ``save_accelerator_state`` and ``load_accelerator_state`` of
``accelerate.checkpointing``, and ``_collect_rng_states`` and ``_set_rng_states`` of Lightning's
``utilities.seed``. Tried with transformers 5.24, accelerate 1.15 and Lightning 2.6; where a version
has no such function, nothing is changed.

Why: each has a list of device types whose generators it saves. Without the state of this one, a
training that is resumed drops out other values than the one that was not stopped.

Until: they ask `torch.accelerator`, or the module of the device, for the state.

The first two write a file of their own beside those of the tool: a list of uint8 (16,), one for
each device. A checkpoint without it, made on another device, loads as ever.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from ...tensors import devices, generators
from ..import_hooks import around

_LIGHTNING_KEY = f"torch.{devices.NAME}"
_LIGHTNING = ("lightning.fabric.utilities.seed", "lightning_fabric.utilities.seed")


def _file(folder: Any, process: int) -> Path:
    return Path(folder) / f"{devices.NAME}_rng_state_{process}.pth"


def _save(folder: Any, process: int) -> None:
    if devices.opened():  # else no number was drawn
        torch.save(generators.get_rng_state_all(), _file(folder, process))


def _load(folder: Any, process: int) -> None:
    file = _file(folder, process)
    if file.is_file():
        _restore(torch.load(file, weights_only=True))


def _restore(states: list[torch.Tensor]) -> None:
    generators.set_rng_state_all(states[: devices.device_count()])


@around("transformers.trainer:Trainer._save_rng_state")
def save_in_trainer(original: Any, self: Any, output_dir: Any) -> None:
    original(self, output_dir)
    _save(output_dir, self.args.process_index)


@around("transformers.trainer:Trainer._load_rng_state")
def load_in_trainer(original: Any, self: Any, checkpoint: Any) -> None:
    original(self, checkpoint)
    if checkpoint is not None:
        _load(checkpoint, self.args.process_index)


@around("accelerate.checkpointing:save_accelerator_state")
def save_in_accelerate(original: Any, *arguments: Any, **keywords: Any) -> Any:
    result = original(*arguments, **keywords)
    given = _named(original, arguments, keywords)
    if {"output_dir", "process_index"} <= given.keys():
        _save(given["output_dir"], given["process_index"])
    return result


@around("accelerate.checkpointing:load_accelerator_state")
def load_in_accelerate(original: Any, *arguments: Any, **keywords: Any) -> Any:
    result = original(*arguments, **keywords)
    given = _named(original, arguments, keywords)
    if {"input_dir", "process_index"} <= given.keys():
        _load(given["input_dir"], given["process_index"])
    return result


def _named(function: Any, arguments: Any, keywords: Any) -> dict[str, Any]:
    return dict(inspect.signature(function).bind(*arguments, **keywords).arguments)


@around(*(f"{module}:_collect_rng_states" for module in _LIGHTNING))
def collect(original: Any, include_cuda: bool = True) -> dict[str, Any]:
    states: dict[str, Any] = original(include_cuda)
    if include_cuda and devices.opened():
        states[_LIGHTNING_KEY] = generators.get_rng_state_all()
    return states


@around(*(f"{module}:_set_rng_states" for module in _LIGHTNING))
def restore(original: Any, rng_state_dict: dict[str, Any]) -> None:
    original(rng_state_dict)
    if _LIGHTNING_KEY in rng_state_dict:
        _restore(rng_state_dict[_LIGHTNING_KEY])
