"""(placeholder)"""


def register() -> None: ...
