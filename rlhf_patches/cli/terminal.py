"""Standard output by way of rich, in a module of its own: rich takes longer to load than most commands do."""

from rich.console import Console


class Terminal(Console):
    """As rich has it, but what is printed is no markup and has no emoji names: most of it comes from outside."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:  # rich would end the process with the status of a refused patch
        raise BrokenPipeError
