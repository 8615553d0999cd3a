"""The table of faults: each is a function that tries something and says what came of it.

    @fault("the device is destroyed during an upload")
    def destroyed_during_upload(tally: Tally) -> None:
        ...
        tally(torch.equal(after, expected), "wrong after the loss")

A fault has a process of its own, so that it may end it: that counts as not survived. A file of this
package holds the faults of one kind; `KINDS` names the files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

KINDS: tuple[str, ...] = (
    "stale",
    "determinism",
    "device_loss",
    "out_of_memory",
    "plan_cache",
    "large_tensors",
    "interrupts",
    "threads",
    "soak",
)
"""Modules of this package, in the order of the table."""


@dataclass
class Tally:
    """What a fault's tries came to.

    Attributes:
        tried, survived: how many.
        details: what was wrong with those that were not survived, the first few.
    """

    tried: int = 0
    survived: int = 0
    details: list[str] = field(default_factory=list)

    def __call__(self, survived: bool, detail: str = "") -> None:
        """Counts a try; ``detail`` says what was wrong if it was not survived."""
        self.tried += 1
        self.survived += survived
        if not survived and len(self.details) < 5:
            self.details.append(detail)


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        name: of its function, which ``--only`` selects by.
        text: for a reader.
        run: the function.
        seconds: after which its process is killed.
    """

    name: str
    text: str
    run: Callable[[Tally], None]
    seconds: float


FAULTS: dict[str, Fault] = {}


def fault(
    text: str, seconds: float = 120
) -> Callable[[Callable[[Tally], None]], Callable[[Tally], None]]:
    """Adds a function to the table."""

    def add(run: Callable[[Tally], None]) -> Callable[[Tally], None]:
        if run.__name__ in FAULTS:
            raise ValueError(f"two faults are named {run.__name__}")
        FAULTS[run.__name__] = Fault(run.__name__, text, run, seconds)
        return run

    return add


def load() -> dict[str, Fault]:
    """The whole table."""
    for kind in KINDS:
        import_module(f"tests.trust.{kind}")
    return FAULTS
