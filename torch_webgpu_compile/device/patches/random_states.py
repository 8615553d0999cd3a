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

import functools
import inspect
from pathlib import Path
from typing import Any

import torch

from .. import devices, generators
from ..import_hooks import after_import

_LIGHTNING_KEY = f"torch.{devices.NAME}"


def install() -> None:
    """Has the tools save and restore the states, once they are imported."""
    after_import("transformers.trainer", _in_trainer)
    after_import("accelerate.checkpointing", _in_accelerate)
    for package in ("lightning.fabric", "lightning_fabric"):
        after_import(f"{package}.utilities.seed", _in_lightning)


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


def _in_trainer(module: Any) -> None:
    trainer: Any = getattr(module, "Trainer", None)
    save = getattr(trainer, "_save_rng_state", None)
    load = getattr(trainer, "_load_rng_state", None)
    if save is None or load is None:
        return

    @functools.wraps(save)
    def _save_rng_state(self: Any, output_dir: Any) -> None:
        save(self, output_dir)
        _save(output_dir, self.args.process_index)

    @functools.wraps(load)
    def _load_rng_state(self: Any, checkpoint: Any) -> None:
        load(self, checkpoint)
        if checkpoint is not None:
            _load(checkpoint, self.args.process_index)

    trainer._save_rng_state = _save_rng_state
    trainer._load_rng_state = _load_rng_state


def _in_accelerate(module: Any) -> None:
    for name, argument, function in (
        ("save_accelerator_state", "output_dir", _save),
        ("load_accelerator_state", "input_dir", _load),
    ):
        original = getattr(module, name, None)
        parameters = inspect.signature(original).parameters if original is not None else {}
        if {argument, "process_index"} <= set(parameters):
            setattr(module, name, _then(original, function, argument))


def _then(original: Any, function: Any, argument: str) -> Any:
    """``original``, followed by ``function(folder, process)`` with two of its arguments."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        given = signature.bind(*arguments, **keywords).arguments
        function(given[argument], given["process_index"])
        return result

    return call


def _in_lightning(module: Any) -> None:
    collect = getattr(module, "_collect_rng_states", None)
    restore = getattr(module, "_set_rng_states", None)
    if collect is None or restore is None:
        return

    @functools.wraps(collect)
    def _collect_rng_states(include_cuda: bool = True) -> dict[str, Any]:
        states: dict[str, Any] = collect(include_cuda)
        if include_cuda and devices.opened():
            states[_LIGHTNING_KEY] = generators.get_rng_state_all()
        return states

    @functools.wraps(restore)
    def _set_rng_states(rng_state_dict: dict[str, Any]) -> None:
        restore(rng_state_dict)
        if _LIGHTNING_KEY in rng_state_dict:
            _restore(rng_state_dict[_LIGHTNING_KEY])

    module._collect_rng_states = _collect_rng_states
    module._set_rng_states = _set_rng_states
