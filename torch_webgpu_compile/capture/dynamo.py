"""What Dynamo must be told before it traces for this backend.

Dynamo traces before it calls a backend, so these settings cannot be made around one compilation.
They change defaults only: a value that the user has set wins.
"""

from __future__ import annotations

from torch._dynamo import config

# Dynamo stops at RNN, GRU and LSTM modules by default. They trace well on the supported versions
# (export allows them by default, too), and other backends get the same traced graph.
DEFAULTS = {"allow_rnn": True}


def prepare() -> None:
    """Changes Dynamo's defaults as `DEFAULTS` says. Called once, when the backend is loaded."""
    for name, value in DEFAULTS.items():
        entry = getattr(config, "_config", {}).get(name)
        if entry is not None and hasattr(entry, "default"):
            # Not an assignment to `config`: from torch 2.13 on that holds for one thread only.
            entry.default = value
        else:
            setattr(config, name, value)
