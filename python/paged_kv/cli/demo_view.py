"""Answers as they come: a table that redraws itself on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from paged_kv.cli.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console


@dataclass(slots=True)
class Answer:
    """One request's answer so far."""

    question: str
    pieces: list[str] = field(default_factory=list)
    state: str = "waiting"

    @property
    def text(self) -> str:
        """All of it, on one line."""
        return " ".join("".join(self.pieces).split())


class View:
    """Collects the answers; what a subclass adds is showing them.

    Parameters
    ----------
    questions : sequence of str
        One per request.

    Notes
    -----
    Each answer is written by one thread; drawing from another may miss its last piece, no more.
    """

    def __init__(self, questions: Sequence[str]) -> None:
        self.answers = [Answer(question) for question in questions]

    def started(self, index: int) -> None:
        """Note that a request was submitted."""
        self.answers[index].state = "running"

    def extend(self, index: int, piece: str) -> None:
        """Add text to an answer."""
        self.answers[index].pieces.append(printable(piece))

    def finished(self, index: int, reason: str | None) -> None:
        """Note that an answer is complete."""
        self.answers[index].state = f"done ({reason})"


class LineView(View):
    """Prints each answer once it is complete: for logs."""

    def __init__(self, console: Console, questions: Sequence[str]) -> None:
        super().__init__(questions)
        self._console = console
        self._printing = threading.Lock()

    def finished(self, index: int, reason: str | None) -> None:
        """Print the answer."""
        super().finished(index, reason)
        answer = self.answers[index]
        with self._printing:
            self._console.print(f"[bold]{index + 1:3}. {escape(answer.question)}[/] {escape(answer.text)}")


class TableView(View):
    """A table with one line per request, for a terminal."""

    def __init__(self, console: Console, questions: Sequence[str]) -> None:
        super().__init__(questions)
        self._console = console

    def render(self) -> Table:
        """Draw the state of this moment: the end of each answer, where it grows."""
        room = max(self._console.width - 60, 20)  # what the other columns leave
        return self._table(lambda answer: Text(answer.text[-room:], no_wrap=True, overflow="ellipsis"))

    def render_whole(self) -> Table:
        """Draw all answers in full."""
        return self._table(lambda answer: Text(answer.text))

    def _table(self, show: Callable[[Answer], Text]) -> Table:
        table = Table(expand=True)
        table.add_column("#", justify="right")
        table.add_column("question", max_width=30, no_wrap=True, overflow="ellipsis")
        table.add_column("answer", ratio=1)
        table.add_column("state")
        for index, answer in enumerate(self.answers, start=1):
            done = answer.state.startswith("done")
            table.add_row(
                str(index), Text(answer.question), show(answer), answer.state, style=None if done else "cyan"
            )
        return table


@contextmanager
def open_view(console: Console, questions: Sequence[str]) -> Iterator[View]:
    """Show answers while the block runs, in the way that fits the console.

    Parameters
    ----------
    console : Console
        Where to show them.
    questions : sequence of str
        One per request.

    Yields
    ------
    View
        To be fed by the threads that receive the answers.
    """
    if not console.is_terminal:
        yield LineView(console, questions)
        return
    view = TableView(console, questions)
    with Live(console=console, get_renderable=view.render, refresh_per_second=10, transient=True):
        yield view
    console.print(view.render_whole())
