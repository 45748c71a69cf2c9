"""Standard output through rich, in a separate module: rich takes longer to load than most commands run."""

from rich.console import Console


class Terminal(Console):
    """rich's console without markup and emoji names, because most text comes from outside."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:  # rich would exit with the status of a refused patch
        raise BrokenPipeError
