"""What lists of passes consist of: `capture.graph.passes.CAPTURE_PASSES`, `compiler.PASSES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import VerificationError


@dataclass(frozen=True)
class Form:
    """What passes take and give.

    Attributes:
        name: the type's name.
        verify: raises VerificationError where it breaks a rule; also given the pass's argument,
            which has been verified, and the state of the list.
        text: for a person to read.
    """

    name: str
    verify: Callable[[Any, Any, Any], None]
    text: Callable[[Any], str]


@dataclass(frozen=True)
class Pass:
    """A step of compilation.

    Attributes:
        name: also the stage's name in ``TORCH_WEBGPU_DEBUG``.
        takes, gives: its argument and its result. A pass that changes nothing gives its argument.
        run: makes the result; what it needs besides is in the state of the list.
        fusion: run only where ``options.fusion`` is this; None: always.
        needed: whether no plan can be made without it, though it gives what it takes.
    """

    name: str
    takes: Form
    gives: Form
    run: Callable[[Any, Any], Any]
    fusion: bool | None = None
    needed: bool = False

    @property
    def is_optional(self) -> bool:
        """Whether a plan that is right, if slower, is made without it."""
        return self.takes is self.gives and not self.needed

    def __call__(self, value: Any, state: Any) -> Any:
        """Its result, verified if that is not ``value``. Raises VerificationError, naming it."""
        result = self.run(value, state)
        if result is not value:
            try:
                self.gives.verify(result, value, state)
            except VerificationError as error:
                raise VerificationError(f"after the pass {self.name}: {error}") from error
        return result
