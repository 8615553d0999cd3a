"""``torch.compiler.save_cache_artifacts`` gives this package's plans, too.

Patched: when it is imported, ``CacheArtifactManager.serialize`` in ``torch.compiler._cache``.

Why: PyTorch asks caches to give it each entry as it is made or read, and keeps its bytes for as
long as the process lives. So only those who call ``save_cache_artifacts`` pay for it: what was used
is read from the cache folder then. The class of the entries is registered as PyTorch has it.

Until: PyTorch asks caches for their entries when somebody wants them.
"""

from __future__ import annotations

from typing import Any

from ..import_hooks import after_import, around

_KIND = "webgpu_plan"


@around("torch.compiler._cache:CacheArtifactManager.serialize")
def serialize(original: Any, cls: Any) -> Any:
    from ...plan import cache

    for key, data in cache.used_entries():
        cls.record_artifact(_KIND, key, data)
    return original(cls)


def _register(module: Any) -> None:
    class PlanArtifact(module.CacheArtifact):  # type: ignore[misc]
        """An entry of the cache folder."""

        def populate_cache(self) -> None:
            """Puts the entry into the folder of this process, if it has one."""
            from ...options import from_environment
            from ...plan import cache

            folder = from_environment().cache
            if folder is not None:
                cache.take_entry(self.key, self.content, folder)

        @staticmethod
        def type() -> str:
            return _KIND

    module.CacheArtifactFactory.register(PlanArtifact)


after_import("torch.compiler._cache", _register)
