"""Recordings of terminals (asciicast version 2 files) and pictures of them.

A recording has a command's terminal output, with times. Its picture is one SVG file, in which the lines appear in
order and remain; a viewer without animations shows the last screen.
"""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS = 112
ROWS = 50
# The maximum playing time of a picture; longer recordings are sped up.
PLAY_S = 8.0
CHAR, LINE, FONT, MARGIN, BAR = 6.6, 16.5, 11.0, 14.0, 30.0  # pixels


@dataclass(frozen=True)
class Recording:
    """A command as a user types it, and its output as pairs of (seconds since the start, text)."""

    command: str
    columns: int
    output: list[tuple[float, str]]


def record(command: Sequence[str], shown: str, path: Path) -> None:
    """Run a command in a new terminal and write the recording.

    Raises:
        SystemExit: the command failed.
    """
    path.parent.mkdir(exist_ok=True)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(COLUMNS)}
    output: list[tuple[float, str]] = []
    start_s = time.monotonic()
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        while data := _read(master):
            output.append((round(time.monotonic() - start_s, 3), data.decode(errors="replace")))
    os.close(master)
    if process.returncode:
        sys.exit(f"{shown} ended with {process.returncode}: {''.join(text for _, text in output)[-2000:]}")
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "command": shown}
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in [header, *([when, "o", text] for when, text in output)])
    )


def _read(descriptor: int) -> bytes:
    """Return the next output, or nothing if the command has ended."""
    select.select([descriptor], [], [])
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux's error if the last writer of a terminal has closed it
        return b""


def load(path: Path) -> Recording:
    """Read a recording."""
    header, *events = map(json.loads, path.read_text().splitlines())
    return Recording(header["command"], header["width"], [(when, text) for when, kind, text in events if kind == "o"])


def printed(recording: Recording) -> str:
    """Return everything that the command printed, without colors and other control sequences."""
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", "".join(text for _, text in recording.output))


@dataclass(frozen=True)
class ScreenLine:
    """One line of the final screen and the second at which it got its text."""

    text: Text
    since_s: float


def screen(recording: Recording) -> list[ScreenLine]:
    """Return the lines of the final screen, each with the time of its newline.

    A line that is redrawn, such as a progress bar, has its last content.
    """
    lines: list[ScreenLine] = []
    line = ""
    for when, text in recording.output:
        for part in text.replace("\r\n", "\n").splitlines(keepends=True):
            line += part
            if part.endswith("\n"):
                lines.append(ScreenLine(_last_drawn(line), when))
                line = ""
    return lines


def _last_drawn(line: str) -> Text:
    return Text.from_ansi(line.rstrip("\n").rsplit("\r", 1)[-1], no_wrap=True)


def picture(recording: Recording) -> str:
    """Return an SVG of the recording, with its colors, in a dark window that is legible on any page."""
    from rich.console import Console

    console = Console(width=recording.columns, color_system="truecolor", force_terminal=True)
    lines = [ScreenLine(Text(f"$ {recording.command}", style="bold"), 0.0), *screen(recording)]
    total_s = max(line.since_s for line in lines) or 1.0
    scale = min(1.0, PLAY_S / total_s)
    width = recording.columns * CHAR + 2 * MARGIN
    height = BAR + len(lines) * LINE + MARGIN
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(recording.command)}">\n',
            f"<style>text{{font:{FONT}px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
            "white-space:pre}@keyframes hidden{from,to{opacity:0}}g{animation-name:hidden}"
            "@media(prefers-reduced-motion){g{animation:none}}</style>\n",
            f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#1B1F24"/>\n',
            *(
                f'<circle cx="{18 + 18 * i}" cy="15" r="5.5" fill="{color}"/>'
                for i, color in enumerate(("#FF5F57", "#FEBC2E", "#28C840"))
            ),
            "\n",
            *_drawn(lines, console, scale),
            "</svg>\n",
        ]
    )


def _drawn(lines: list[ScreenLine], console: "object", scale: float) -> Iterator[str]:
    for number, line in enumerate(lines):
        y = BAR + number * LINE + FONT
        yield f'<g style="animation-duration:{line.since_s * scale:.2f}s">'
        x = MARGIN
        for segment in Segment.simplify(line.text.render(console)):  # type: ignore[arg-type]
            columns = cell_len(segment.text)
            if segment.text.strip():
                yield (
                    f'<text x="{x:.1f}" y="{y:.1f}" textLength="{columns * CHAR:.1f}" xml:space="preserve" '
                    f"{_style(segment.style)}>"
                    f"{escape(segment.text)}</text>"
                )
            x += columns * CHAR
        yield "</g>\n"


def _style(style: Style | None) -> str:
    color = (
        style.color.get_truecolor(MONOKAI).hex if style and style.color and not style.color.is_default else "#D6DBE1"
    )
    weight = ' font-weight="bold"' if style and style.bold else ""
    return f'fill="{color}"{weight}'
