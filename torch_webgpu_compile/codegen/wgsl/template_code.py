"""`TemplateCode`: what Jinja makes of templates, kept for other processes.

A process that renders kernels needs some twenty templates, for which Jinja takes half a second.
"""

from __future__ import annotations

import sys

import jinja2
from jinja2.bccache import Bucket, BytecodeCache

from ...options import from_environment
from ...plan.cache import installed
from ...plan.stored_entries import read_entry, write_entry


class TemplateCode(BytecodeCache):
    """Python's bytecode of templates, in the cache folder that the environment names.

    Entries are this installation's, as Jinja's settings are in them, too: an edit of the package
    makes others. One that is damaged is made again.
    """

    def load_bytecode(self, bucket: Bucket) -> None:
        """Gives the bucket the code that was kept, if there is some."""
        folder = from_environment().cache
        if folder is None:
            return
        content = read_entry(_key(bucket), "template", folder)
        if content is not None:
            bucket.bytecode_from_string(content)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keeps the code of the bucket."""
        folder = from_environment().cache
        if folder is not None:
            write_entry(_key(bucket), "template", bucket.bytecode_to_string(), folder)


def _key(bucket: Bucket) -> str:
    return installed(f"{bucket.key} {jinja2.__version__} {sys.version}")
