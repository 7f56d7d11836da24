"""A terminal that prints what it is given: names and answers may have [brackets] and :colons:."""

from rich.console import Console


def terminal(*, stderr: bool = False, quiet: bool = False) -> Console:
    """rich's console without its small languages."""
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)
