"""Random numbers on the device: a seed and a counter per device.

Kernels hash a seed of 64 bits with the position of an element. Each random operator takes one seed,
a hash of the device's seed and of its counter, as CUDA's generators do with Philox's offset. Equal
seeds give equal numbers in any process; they are not those of the CPU.
"""

from __future__ import annotations

import functools
import os
import struct
import threading
from collections.abc import Iterable
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..plan.seeds import WORD, seed_bytes
from ..torch_private import Generator
from . import devices, generator_devices

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]

_STATE = struct.Struct("<Qq")  # seed, offset: the layout of a CUDA generator's state

_lock = threading.Lock()
_states: dict[int, tuple[int, int]] = {}
_default_seed: int | None = None


def _state_of(index: int) -> tuple[int, int]:
    """(seed, offset). A device that was never seeded has the seed of PyTorch's generator."""
    state = _states.get(index)
    if state is None:
        seed = torch.initial_seed() if _default_seed is None else _default_seed
        state = _states[index] = seed & WORD, 0
    return state


def draw_seeds(index: int, count: int, generator: torch.Generator | None = None) -> bytes:
    """Seeds for ``count`` random operators on ``webgpu:index``: int32 (count, 2), as bytes.

    Args:
        generator: one for the device, or one of `default_generators`, to draw them from in the
            place of the device's own.

    Raises:
        RuntimeError: the generator is for another device.
    """
    place = index
    if generator is not None:
        known = _of_device(generator)
        if not isinstance(known, _DefaultGenerator):
            numbers = torch.empty((count, 2), dtype=torch.int32, device="cpu")
            return numbers.random_(generator=known.on_host()).numpy().tobytes()
        place = known.device.index
    with _lock:
        seed, offset = _state_of(place)
        _states[place] = seed, offset + count
    return seed_bytes(seed, offset, count)


def manual_seed(seed: int) -> None:
    """Seeds the current device."""
    _seed(devices.current_index(), seed)


def _seed(index: int, seed: int) -> None:
    with _lock:
        _states[index] = int(seed) & WORD, 0


def manual_seed_all(seed: int) -> None:
    """Seeds all devices. ``torch.manual_seed`` does it too."""
    global _default_seed
    with _lock:
        _states.clear()
        _default_seed = int(seed) & WORD


def seed() -> None:
    """Seeds the current device with a random number."""
    manual_seed(_random_seed())


def seed_all() -> None:
    """Seeds all devices with one random number."""
    manual_seed_all(_random_seed())


def _random_seed() -> int:
    return int.from_bytes(os.urandom(8), "little")


def initial_seed() -> int:
    """The seed of the current device."""
    with _lock:
        return _state_of(devices.current_index())[0]


def get_rng_state(device: torch.device | str | int = "webgpu") -> Tensor:
    """The state of a device's generator: uint8 (16,) on the CPU."""
    with _lock:
        seed, offset = _state_of(devices.resolve_index(device))
    return torch.frombuffer(bytearray(_STATE.pack(seed, offset)), dtype=torch.uint8)


def get_rng_state_all() -> list[Tensor]:
    """The states of all devices' generators."""
    return [get_rng_state(index) for index in range(devices.device_count())]


def set_rng_state(new_state: Tensor, device: torch.device | str | int = "webgpu") -> None:
    """Sets the state of a device's generator.

    Raises:
        TypeError, RuntimeError: the tensor is not what `get_rng_state` gives.
    """
    if new_state.dtype != torch.uint8 or new_state.device.type != "cpu":
        raise TypeError("RNG state must be a torch.ByteTensor on the CPU")
    if new_state.numel() != _STATE.size:
        raise RuntimeError(
            f"RNG state has {new_state.numel()} bytes, a webgpu device's has {_STATE.size}"
        )
    seed, offset = _STATE.unpack(bytes(new_state.tolist()))
    with _lock:
        _states[devices.resolve_index(device)] = seed, offset


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    """Sets the states of all devices' generators."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


_Generator: Any = Generator


class DeviceGenerator(_Generator):  # type: ignore[misc]
    """``torch.Generator(device="webgpu")``: its numbers are those of a generator on the host."""

    _place: torch.device
    _host: Any

    def __new__(cls, place: torch.device) -> Self:
        made: Self = super().__new__(cls)
        made._place = place
        made._host = _Generator() if generator_devices.move(made, place) else made
        _made[made._cdata] = made
        return made

    @property
    def device(self) -> torch.device:
        return self._place

    def on_host(self) -> torch.Generator:
        """A generator on the host with this one's numbers, for an operator on the host."""
        host: torch.Generator = self._host
        return host

    def get_state(self) -> Tensor:
        state: Tensor = _Generator.get_state(self._host)
        return state

    def set_state(self, new_state: Tensor) -> Self:
        _Generator.set_state(self._host, new_state)
        return self

    def manual_seed(self, seed: int) -> Self:
        _Generator.manual_seed(self._host, seed)
        return self

    def seed(self) -> int:
        return int(_Generator.seed(self._host))

    def initial_seed(self) -> int:
        return int(_Generator.initial_seed(self._host))

    def clone_state(self) -> torch.Generator:
        return DeviceGenerator(self._place).set_state(self.get_state())

    def __reduce__(self) -> tuple[Any, ...]:
        _, _, state = _Generator.__reduce__(self._host)
        return torch.Generator, (self.device,), state

    def __setstate__(self, state: Any) -> None:
        _Generator.__setstate__(self._host, state)


_made: WeakValueDictionary[int, DeviceGenerator] = WeakValueDictionary()
"""By the address of its part in C++."""


class _DefaultGenerator(DeviceGenerator):
    """The generator of a device as an object: its state is that of the functions above."""

    def on_host(self) -> torch.Generator:
        drawn = int.from_bytes(draw_seeds(self._place.index, 1), "little", signed=True)
        return torch.Generator().manual_seed(drawn)

    def get_state(self) -> Tensor:
        return get_rng_state(self._place.index)

    def set_state(self, new_state: Tensor) -> _DefaultGenerator:
        set_rng_state(new_state, self._place.index)
        return self

    def manual_seed(self, seed: int) -> _DefaultGenerator:
        _seed(self._place.index, seed)
        return self

    def seed(self) -> int:
        seed = _random_seed()
        _seed(self._place.index, seed)
        return seed

    def initial_seed(self) -> int:
        with _lock:
            return _state_of(self._place.index)[0]

    def get_offset(self) -> int:
        with _lock:
            return _state_of(self._place.index)[1]

    def set_offset(self, offset: int) -> None:
        with _lock:
            _states[self._place.index] = _state_of(self._place.index)[0], int(offset)

    def clone_state(self) -> torch.Generator:
        raise NotImplementedError(
            "the state of a webgpu device's own generator has no second one: use get_state() and "
            "torch.Generator('webgpu').manual_seed(seed)"
        )

    def graphsafe_get_state(self) -> torch.Generator:
        return self.clone_state()

    def __reduce__(self) -> tuple[Any, ...]:
        return _default_generator, (self._place.index,)


@functools.cache
def _default_generator(index: int) -> _DefaultGenerator:
    return _DefaultGenerator(devices.torch_device(index))


def _of_device(generator: Any) -> DeviceGenerator:
    """The object that was made for a device; kernels get another one with its part in C++.

    Raises:
        RuntimeError: the generator is for another device.
    """
    known = _made.get(generator._cdata)
    if known is None:
        raise RuntimeError(f"Expected a '{devices.NAME}' device type for generator but found 'cpu'")
    return known


def on_host(generator: torch.Generator) -> torch.Generator:
    """A generator on the host with the numbers of a device's generator.

    Raises:
        RuntimeError: the generator is for another device.
    """
    return _of_device(generator).on_host()


def default_generators() -> tuple[torch.Generator, ...]:
    """The generators of all devices, each with the state that `get_rng_state` gives."""
    return tuple(map(_default_generator, range(devices.device_count())))
