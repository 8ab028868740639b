"""Which display a run gets: a panel on a terminal, lines everywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol, Self, TextIO

from segue.events.codec import Recorded
from segue.progress.plain import PlainDisplay
from segue.progress.view import RunView


class Display(Protocol):
    """Shows a run while its events come in; a context manager, because a panel owns the terminal meanwhile."""

    @property
    def view(self) -> RunView: ...

    def apply(self, event: Recorded) -> None:
        """Fold in the next event of the log and show what changed."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_display(*, plain: bool = False, stream: TextIO | None = None) -> Display:
    """The display for `stream` (standard output); lines where it is no terminal or where `plain` asks for them."""
    out = stream or sys.stdout
    if plain or not out.isatty():
        return PlainDisplay(out, since_wall_s=time.time())
    from rich.console import Console

    from segue.progress.live import LiveDisplay

    return LiveDisplay(Console(file=out))
