"""The look that every figure shares: one set of inks, one type, one page laid out from its top down.

A page is measured in inches and its texts in points before anything is drawn, so that a long name is cut where it would
leave the page and the same record gives the same bytes. No colour carries a meaning alone: a sign, a shape or a word
says the same.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from harness.errors import HarnessError
from harness.files import write_atomic

INK, MUTED, RULE, GRID, HATCH = "#1F2328", "#636B74", "#8A9099", "#E6E8EB", "#D3D8DD"
BASE, LEVER = "#27459F", "#D9730D"
"""Arm A and arm B."""
GAIN, TAX, NOISE = "#0E7F73", "#B63410", "#B4BAC1"
"""Less time, more time, and what cannot be told from either; a sign or a word always stands beside them."""
MARK = "#6E2A68"
"""A bar that a figure is held against."""

WIDTH, MARGIN = 9.0, 0.22
TITLE, BODY, SMALL = 12.0, 9.0, 8.0
DPI = 150
LEAST_AXIS = 2.4
"""The least width of a chart beside its names and columns, inches; names are cut for it."""

LOOK: Any = {
    "font.family": "DejaVu Sans", "font.size": BODY, "text.parse_math": False, "text.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": RULE, "axes.linewidth": 0.8,
    "axes.labelcolor": MUTED, "axes.labelsize": SMALL + 0.5, "axes.axisbelow": True, "axes.grid": True,
    "grid.color": GRID, "grid.linewidth": 0.8, "xtick.color": RULE, "ytick.color": RULE, "xtick.labelcolor": INK,
    "ytick.labelcolor": INK, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "xtick.major.size": 3, "ytick.major.size": 3,
    "legend.frameon": False, "legend.fontsize": SMALL, "legend.handletextpad": 0.5, "legend.borderaxespad": 0.0,
    "hatch.color": HATCH, "hatch.linewidth": 0.8, "figure.facecolor": "white", "savefig.dpi": DPI, "svg.hashsalt": "harness",
}  # fmt: skip


def look() -> Any:
    """The context in which every figure is drawn and saved."""
    return rc_context(LOOK)


def figure_format(path: Path) -> str:
    """png, svg or pdf, by the path's suffix. Raises HarnessError for another one."""
    suffix = path.suffix.lower().lstrip(".")
    if suffix not in ("png", "svg", "pdf"):
        raise HarnessError(
            f"cannot draw {path}: {path.suffix or 'no suffix'} is no figure format here; use .png, .svg or .pdf."
        )
    return suffix


@lru_cache(maxsize=4096)
def text_width(text: str, size: float = BODY, bold: bool = False) -> float:
    """The width of one line of text in inches."""
    font = get_font(findfont(FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal")))
    font.set_size(size, DPI)
    font.set_text(text, 0.0)
    return 1.02 * float(font.get_width_height()[0]) / 64 / DPI + 0.02  # hinting moves letters by fractions of a dot


def elide(text: str, width: float, size: float = BODY, bold: bool = False) -> str:
    """The text, its middle cut out where it is wider than `width` inches."""
    if text_width(text, size, bold) <= width:
        return text
    for kept in range(len(text) - 2, 1, -1):
        short = f"{text[: (kept + 1) // 2].rstrip()}…{text[len(text) - kept // 2 :].lstrip()}"
        if text_width(short, size, bold) <= width:
            return short
    return "…"


def wrap(text: str, width: float, size: float = BODY, bold: bool = False) -> list[str]:
    """The text in lines of at most `width` inches; a single word that is wider is cut."""
    lines: list[str] = []
    for word in text.split():
        word = elide(word, width, size, bold)
        if lines and text_width(f"{lines[-1]} {word}", size, bold) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def spread(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float, gap: float) -> list[float]:
    """Centres of labels along one line: as near as may be to those wanted, in their order, `gap` apart, in [low, high]."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = dict(enumerate(wanted))
    edge = low
    for i in order:
        placed[i] = max(wanted[i], edge + sizes[i] / 2)
        edge = placed[i] + sizes[i] / 2 + gap
    edge = high
    for i in reversed(order):
        placed[i] = min(placed[i], edge - sizes[i] / 2)
        edge = placed[i] - sizes[i] / 2 - gap
    return [placed[i] for i in range(len(wanted))]


@dataclass(frozen=True)
class Column:
    """One column of text beside a chart's rows, right-aligned under its header unless `left`."""

    header: str
    cells: Sequence[str]
    left: bool = False
    bold: Sequence[bool] = ()
    colours: Sequence[str] = ()

    @property
    def width(self) -> float:
        """Inches, header included."""
        return max(text_width(self.header, SMALL), *(text_width(c, BODY, bold=True) for c in self.cells), 0.1)


@dataclass
class Page:
    """A figure from its top down: title, lines under it, strips that hold the axes, footnotes. Heights in inches."""

    title: str
    strips: Sequence[float]
    lines: Sequence[str | tuple[str, str]] = ()  # a line, or (line, colour): that one is bold
    foot: Sequence[str] = ()
    width: float = WIDTH
    figure: Figure = field(init=False)

    def __post_init__(self) -> None:
        room = self.width - 2 * MARGIN
        above: list[tuple[str, str, float, bool]] = [
            (line, INK, TITLE, True) for line in wrap(self.title, room, TITLE, True)
        ]
        for entry in self.lines:
            text, ink = entry if isinstance(entry, tuple) else (entry, MUTED)
            bold = isinstance(entry, tuple)
            above += [(line, ink, BODY, bold) for line in wrap(text, room, BODY, bold)]
        below = [line for entry in self.foot for line in wrap(entry, room, SMALL)]
        head = MARGIN + sum(_leading(size) for _, _, size, _ in above) + 0.08
        foot = MARGIN + _leading(SMALL) * len(below)
        self.height = head + sum(self.strips) + foot
        self._tops = [head + sum(self.strips[:i]) for i in range(len(self.strips))]
        self.figure = Figure(figsize=(self.width, self.height), dpi=DPI, facecolor="white")
        at = MARGIN
        for line, ink, size, bold in above:
            self.text(MARGIN, at, line, fontsize=size, color=ink, fontweight="bold" if bold else "normal", va="top")
            at += _leading(size)
        at = self.height - foot + 0.04
        for line in below:
            self.text(MARGIN, at, line, fontsize=SMALL, color=MUTED, va="top")
            at += _leading(SMALL)

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        """Text at `x` inches from the left and `y` from the top of the page."""
        self.figure.text(x / self.width, 1 - y / self.height, text, **style)

    def axes(self, strip: int, *, left: float, right: float = MARGIN, top: float = 0.0, bottom: float = 0.0) -> Axes:
        """Axes inside one strip: margins in inches, left and right from the page's edges, top and bottom from the strip's."""
        y = self._tops[strip] + self.strips[strip] - bottom
        tall = self.strips[strip] - top - bottom
        return self.figure.add_axes(
            (left / self.width, 1 - y / self.height, (self.width - left - right) / self.width, tall / self.height)
        )

    def rows(self, strip: int, labels: Sequence[str], columns: Sequence[Column] = (), *, bottom: float = 0.42,
             most: float = 3.3, bold: Sequence[bool] = ()) -> Axes:  # fmt: skip
        """Axes with one row of a chart per label, the first on top (y = 0, 1, …), and columns of text to their right."""
        head = _leading(SMALL) + 0.04 if any(c.header for c in columns) else 0.06
        beside = sum(column.width + 0.17 for column in columns)
        most = max(1.0, min(most, self.width - 2 * MARGIN - beside - LEAST_AXIS))
        names = [elide(label, most) for label in labels]
        left = MARGIN + max((text_width(name, BODY, bold=True) for name in names), default=0.0) + 0.1
        ends, right = [], MARGIN
        for column in reversed(columns):
            ends.append(right)
            right += column.width + 0.17
        ends.reverse()
        axes = self.axes(strip, left=left, right=right + 0.04, top=head, bottom=bottom)
        axes.set_yticks(range(len(names)), names, fontsize=BODY, color=INK)
        for tick, heavy in zip(axes.get_yticklabels(), bold, strict=False):
            tick.set_fontweight("bold" if heavy else "normal")
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        top = self._tops[strip]
        tall = (self.strips[strip] - head - bottom) / max(len(names), 1)
        for column, end in zip(columns, ends, strict=True):
            x = self.width - end - (column.width if column.left else 0.0)
            side = "left" if column.left else "right"
            self.text(x, top + head - 0.05, column.header, fontsize=SMALL, color=MUTED, ha=side, va="bottom")
            for i, cell in enumerate(column.cells):
                heavy = bool(column.bold) and column.bold[i]
                ink = column.colours[i] if column.colours else INK
                self.text(x, top + head + tall * (i + 0.5), cell, fontsize=BODY, color=ink, ha=side, va="center_baseline",
                          fontweight="bold" if heavy else "normal")  # fmt: skip
        return axes

    def legend(
        self, strip: int, handles: Iterable[Any], *, columns: int, x: float = MARGIN, y: float = 0.0, title: str = ""
    ) -> None:
        """A legend whose upper left corner is `x` inches from the page's left and `y` below the strip's top."""
        box = self.figure.legend(
            handles=list(handles), loc="upper left", bbox_to_anchor=(x / self.width, 1 - (self._tops[strip] + y) / self.height),
            ncols=columns, title=title or None, title_fontsize=SMALL, alignment="left", columnspacing=1.4, labelspacing=0.6,
            borderpad=0.0,
        )  # fmt: skip
        box.get_title().set_color(MUTED)

    def save(self, path: Path) -> None:
        """Writes the figure whole or not at all, in the format of the path's suffix; the same figure, the same bytes."""
        kind = figure_format(path)
        silent: dict[str, Any] = {
            "png": {"Software": None},
            "svg": {"Date": None, "Creator": None},
            "pdf": {"CreationDate": None},
        }
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format=kind, metadata=silent[kind])
        write_atomic(path, _smaller(buffer) if kind == "png" else buffer.getvalue())


def _smaller(png: io.BytesIO) -> bytes:
    """The same picture with a palette, a third of the bytes: a figure has few inks, and the rest are edges of letters.

    The inks stay exact: colours are taken by how often they occur, and one within 6 of 255 of a colour taken becomes it.
    """
    pixels = np.asarray(Image.open(png).convert("RGB"), dtype=np.int32)
    codes, where, counts = np.unique(pixels @ (1 << 16, 1 << 8, 1), return_inverse=True, return_counts=True)
    shades = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], axis=1)
    palette = shades[:0]
    for shade in shades[np.argsort(-counts, kind="stable")]:
        if len(palette) < 256 and (np.abs(palette - shade).max(axis=1) > 6).all():
            palette = np.vstack([palette, shade])
    nearest = np.abs(shades[:, None] - palette).sum(axis=2).argmin(axis=1).astype(np.uint8)
    picture = Image.fromarray(nearest[where].reshape(pixels.shape[:2]), mode="P")
    picture.putpalette(palette.astype(np.uint8).tobytes())
    out = io.BytesIO()
    picture.save(out, format="png", optimize=True, dpi=(DPI, DPI))
    return out.getvalue()


def _leading(size: float) -> float:
    """The height of a line of text, inches."""
    return 1.45 * size / 72


def bare(axes: Axes) -> None:
    """No spines and no grid."""
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(visible=False)


def whole_numbers(axis: Axis) -> None:
    """Ticks at whole numbers alone."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def percents(axis: Axis) -> None:
    """Ticks as signed percentages of fractions, never a quarter, which a label would round away; as many as have room."""
    box = axis.axes.bbox
    room = box.width / DPI / 0.6 if axis is axis.axes.xaxis else box.height / DPI / 0.4
    axis.set_major_locator(MaxNLocator(nbins=max(1, min(8, int(room))), steps=[1, 2, 5, 10]))
    axis.set_major_formatter(
        FuncFormatter(lambda v, _: f"{round(100 * v, 6):+g}%".replace("-", "−") if abs(v) > 1e-9 else "0%")
    )


def signed(value: float, digits: int = 2) -> str:
    """A signed figure with a true minus; what rounds to nothing has no sign."""
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text if any(c in "123456789" for c in text) else text[1:]


def is_dark(shade: str) -> bool:
    """True where white text reads better than black on it. shade: #RRGGBB."""
    red, green, blue = (int(shade[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140
