"""What takes the place of a name that a version of PyTorch does not have."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import PyTorchVersionError
from . import versions
from .symbols import Loss, Symbol


def _error(symbol: Symbol) -> PyTorchVersionError:
    import torch

    oldest, newest = map(versions.text, (versions.OLDEST, versions.NEWEST))
    return PyTorchVersionError(
        f"PyTorch {torch.__version__} has no `{symbol.dotted}`, which torch-webgpu-compile needs "
        f"for {symbol.purpose}; it was tried with PyTorch {oldest} to {newest}: update "
        "torch-webgpu-compile, or install one of these"
    )


class _Absent(type):
    """The class of stand-ins: classes without instances, of which every use is an error.

    So they may stand in ``isinstance`` and ``except``, and in tables, where they match nothing.
    """

    symbol: Symbol

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        raise _error(cls.symbol)

    def __getitem__(cls, _: object) -> _Absent:  # a generic class with its parameters
        return cls

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # Python itself asks for those
            raise AttributeError(name)
        raise _error(cls.symbol)


def stand_in(symbol: Symbol) -> Any:
    """What users of a missing name get, as its row says.

    Raises:
        PyTorchVersionError: nothing works without it.
    """
    if symbol.loss is Loss.FATAL:
        raise _error(symbol)
    if symbol.loss is Loss.REPLACED:
        return None
    return _Absent(symbol.name, (Exception,), {"symbol": symbol})
