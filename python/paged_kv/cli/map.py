"""``paged-kv map``: watch the pages of a running program."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from paged_kv import telemetry
from paged_kv.cli.map_picture import check_name, save
from paged_kv.cli.map_view import Screen

if TYPE_CHECKING:
    from pathlib import Path

    from paged_kv.telemetry import Rates, Snapshot

_RATE_SECONDS = 3.0
"""Rates are measured over about so long."""


class Follower:
    """Reads a published file whenever it was replaced, and keeps enough to tell rates.

    Parameters
    ----------
    path : Path
        The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._past: deque[Snapshot] = deque()

    def look(self) -> Snapshot:
        """Return the newest snapshot.

        Raises
        ------
        ValueError
            Where there is none, or none that can be read.
        """
        try:
            stat = self._path.stat()
            if self._seen != (stat.st_ino, stat.st_mtime_ns):
                self._add(telemetry.read(self._path))
                self._seen = stat.st_ino, stat.st_mtime_ns
        except OSError as error:
            raise ValueError(
                f"can't read {self._path}: {error.strerror}; a program publishes there if it is started with "
                "--telemetry, or runs a paged_kv.telemetry.Publisher"
            ) from None
        return self._past[-1]

    def _add(self, taken: Snapshot) -> None:
        while len(self._past) > 1 and taken.time - self._past[1].time >= _RATE_SECONDS:
            self._past.popleft()
        self._past.append(taken)

    def rates(self) -> Rates | None:
        """Measure over the last seconds; None until there are two snapshots of one cache."""
        try:
            return telemetry.rates(self._past[0], self._past[-1])
        except ValueError:
            # The first one, or another program's: begin anew.
            self._past = deque([self._past[-1]])
            return None

    def screen(self) -> Screen:
        """Draw what was last seen."""
        taken = self._past[-1]
        return Screen(taken, self.rates(), max(time.time() - taken.time, 0))


def run_map(path: Path, *, refresh: float, snapshot: Path | None, console: Console | None = None) -> None:
    """Watch a published cache until its program ends, or draw it once.

    Parameters
    ----------
    path : Path
        Where the program publishes.
    refresh : float
        Seconds between looks.
    snapshot : Path, optional
        A ``.svg`` or ``.png`` file to draw instead of the terminal.
    console : Console, optional
        Where to draw; the terminal if None. One that is none gets a single picture.

    Raises
    ------
    ValueError
        Where nothing that can be read is published, or a picture's name tells no format.
    """
    if snapshot is not None:
        check_name(snapshot)
    follower = Follower(path)
    taken = follower.look()
    if snapshot is not None:
        save(taken, snapshot)
        return
    console = console or Console()
    if console.is_terminal:
        _watch(console, follower, refresh)
    console.print(follower.screen())


def _watch(console: Console, follower: Follower, refresh: float) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while follower.look().interval > 0:
                live.update(follower.screen(), refresh=True)
                time.sleep(refresh)
        except KeyboardInterrupt:
            return
