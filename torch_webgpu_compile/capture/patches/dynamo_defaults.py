"""Settings of Dynamo for this backend.

Patched: the defaults of ``torch._dynamo.config`` that `DEFAULTS` names. A value that the user has
set wins.

Why: Dynamo traces before it calls a backend, so its settings cannot be made around one compilation.
It stops at RNN, GRU and LSTM modules by default. They trace well on the supported versions (export
allows them by default, too), and other backends get the same traced graph.

Until: ``allow_rnn`` is Dynamo's default, or a backend can say it.
"""

from __future__ import annotations

from ...torch_private import dynamo_config

DEFAULTS = {"allow_rnn": True}


def install() -> None:
    """Changes the defaults."""
    for name, value in DEFAULTS.items():
        entry = getattr(dynamo_config, "_config", {}).get(name)
        if entry is not None and hasattr(entry, "default"):
            # Not an assignment to `config`: from torch 2.13 on that holds for one thread only.
            entry.default = value
        else:
            setattr(dynamo_config, name, value)
