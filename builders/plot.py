"""Draws a plan: its pools against the device's memory, and which limits would fit."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from builders.canvas import Canvas, Hatch, PngCanvas, SvgCanvas
from builders.plan_report import Report
from builders.projection import Fit, fit_of
from edgevlm.commands.plan_report import human_bytes
from edgevlm.errors import BuildError

WIDTH, LABELS, RIGHT = 960, 150, 40  # pixels: all, left of the bars, right of them
ROW, BAR = 30, 20
CHART_HEIGHT, COLUMNS, TICKS = 320, 32, 5
STYLES: tuple[tuple[int, Hatch], ...] = (
    (190, "/"),
    (235, "x"),
    (150, ""),
    (255, "-"),
    (215, "\\"),
    (255, "|"),
    (235, "+"),
    (120, "/"),
)


def draw(found: Report, path: Path) -> None:
    """Write the drawing. Raises BuildError where the name's ending is not one of three."""
    kind = path.suffix.lower()
    height = _height(found)
    try:
        if kind == ".png":
            picture = PngCanvas(WIDTH, height)
            _draw_all(picture, found)
            path.write_bytes(picture.png())
        elif kind in (".svg", ".html"):
            canvas = SvgCanvas(WIDTH, height)
            _draw_all(canvas, found)
            text = canvas.svg() if kind == ".svg" else _page(found, canvas.svg())
            path.write_text(text, encoding="utf-8")
        else:
            raise BuildError(f"--plot is {path}; the name must end in .svg, .png or .html")
    except OSError as error:
        raise BuildError(f"{path} cannot be written: {error.strerror}") from error


def _height(found: Report) -> int:
    return 160 + ROW * len(found.planned.plan.pools) + CHART_HEIGHT + 90


def _title(found: Report) -> str:
    limits = found.planned.plan.limits
    words = f"{found.model.name} on {found.device.title}: {limits.max_seq_len:,} tokens"
    words += f" x {limits.slots} slots" if limits.slots > 1 else ""
    return words + (f", pictures of {limits.max_pixels:,} pixels" if limits.max_pixels else "")


def _page(found: Report, svg: str) -> str:
    title = html.escape(_title(found))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<body>{svg}</body></html>\n"
    )


def _draw_all(canvas: Canvas, found: Report) -> None:
    canvas.text(20, 32, _title(found), size=17)
    below = _draw_pools(canvas, found, 50)
    _draw_region(canvas, found, below + 50)


def _draw_pools(canvas: Canvas, found: Report, top: float) -> float:
    """The device in one bar, then every pool where the one before ends; returns the lower end."""
    ledger, device = found.planned.plan, found.device
    whole = max(device.memory_bytes, device.os_bytes + ledger.total_bytes)
    scale = (WIDTH - LABELS - RIGHT) / whole
    end_of_budget = LABELS + (device.os_bytes + found.budget.bytes) * scale
    y = top + 14
    canvas.text(LABELS - 8, y + 15, "device", "end")
    canvas.rect(LABELS, y, device.memory_bytes * scale, BAR, 255)
    x = float(LABELS)
    if device.os_bytes:
        canvas.rect(x, y, device.os_bytes * scale, BAR, 90)
        x += device.os_bytes * scale
    canvas.text(LABELS, y - 6, f"memory {human_bytes(device.memory_bytes)}", size=12)
    rows = [pool for pool in ledger.pools if not pool.reclaimable]
    if device.os_bytes:
        y += ROW
        canvas.text(LABELS - 8, y + 15, "system", "end")
        canvas.rect(LABELS, y, device.os_bytes * scale, BAR, 90)
        _beside(canvas, x, y, human_bytes(device.os_bytes))
    for number, pool in enumerate(rows):
        y += ROW
        width = pool.bytes * scale
        canvas.text(LABELS - 8, y + 15, pool.name, "end")
        canvas.rect(x, y, max(width, 1.0), BAR, *STYLES[number % len(STYLES)])
        share = f"{human_bytes(pool.bytes)}, {pool.bytes / ledger.total_bytes:.0%}"
        _beside(canvas, x + width, y, share, left_of=x)
        canvas.rect(x, top + 14, width, BAR, *STYLES[number % len(STYLES)])
        x += width
    bottom = y + BAR + 8
    canvas.line(end_of_budget, top + 8, end_of_budget, bottom, dashed=True)
    left = found.budget.bytes - ledger.total_bytes
    verdict = f"{human_bytes(left)} left" if left >= 0 else f"{human_bytes(-left)} TOO MUCH"
    words = f"plan {human_bytes(ledger.total_bytes)}, budget {human_bytes(found.budget.bytes)}"
    canvas.text(end_of_budget, bottom + 15, f"{words}: {verdict} (dashed: end of budget)", "end")
    return bottom + 15


def _beside(canvas: Canvas, x: float, y: float, words: str, left_of: float | None = None) -> None:
    """To the right of a bar, or to its left where there is no room."""
    if left_of is not None and x + 7 * len(words) + 14 > WIDTH:
        canvas.text(left_of - 6, y + 15, words, "end", 12)
    else:
        canvas.text(x + 6, y + 15, words, size=12)


@dataclass(frozen=True)
class _Chart:
    """Maps values of the two axes to places in the drawing."""

    top: float
    first: float
    last: float
    highest: float  # tokens

    def x(self, value: float) -> float:
        """Where a value of the lower axis lies."""
        return LABELS + (value - self.first) / (self.last - self.first) * (WIDTH - LABELS - RIGHT)

    def y(self, value: float) -> float:
        """Where a number of tokens lies."""
        return self.top + CHART_HEIGHT * (1 - min(value, self.highest) / self.highest)


def _draw_region(canvas: Canvas, found: Report, top: float) -> None:
    """Context against pixels, or against slots where there are no pictures."""
    pictures = found.planned.plan.limits.max_pixels > 0
    fits = _pixel_fits(found) if pictures else _slot_fits(found)
    values = [float(f.max_pixels if pictures else f.slots) for f in fits]
    step = values[1] - values[0]
    longest = max((f.max_seq_len or 0 for f in fits), default=0)
    limits = found.planned.plan.limits
    highest = max(longest, limits.max_seq_len) * 1.1
    chart = _Chart(top + 20, values[0] - step / 2, values[-1] + step / 2, highest)
    across = "pixels of the largest picture" if pictures else "slots"
    canvas.text(20, top + 4, f"hatched: what fits into {human_bytes(found.budget.bytes)}", size=13)
    for value, fit in zip(values, fits, strict=True):
        if fit.max_seq_len is not None:
            x1, x2 = chart.x(value - step / 2), chart.x(value + step / 2)
            y1, y2 = chart.y(fit.max_seq_len), chart.y(fit.image_tokens)
            canvas.rect(x1, y1, x2 - x1, y2 - y1, 235, "/")
    if pictures:
        start, end = fits[0], fits[-1]
        points = (start.max_pixels, start.image_tokens), (end.max_pixels, end.image_tokens)
        (xa, ya), (xb, yb) = [(chart.x(p), chart.y(t)) for p, t in points]
        canvas.line(xa, ya, xb, yb, dashed=True)
        canvas.text(WIDTH - RIGHT, yb - 8, "tokens of the picture alone", "end", 12)
    _draw_axes(canvas, chart, across, whole=not pictures)
    x, y = chart.x(limits.max_pixels if pictures else limits.slots), chart.y(limits.max_seq_len)
    canvas.rect(x - 5, y - 5, 10, 10, 0)
    canvas.rect(x + 9, y - 20, 130, 17, 255)
    canvas.text(x + 14, y - 7, f"this plan: {limits.max_seq_len:,}", size=12)


def _draw_axes(canvas: Canvas, chart: _Chart, across: str, whole: bool) -> None:
    bottom, right = chart.top + CHART_HEIGHT, WIDTH - RIGHT
    canvas.line(LABELS, chart.top, LABELS, bottom)
    canvas.line(LABELS, bottom, right, bottom)
    for tokens in _ticks(chart.highest):
        canvas.line(LABELS - 4, chart.y(tokens), LABELS, chart.y(tokens))
        canvas.text(LABELS - 8, chart.y(tokens) + 4, f"{tokens:,}", "end", 12)
    for value in range(1, int(chart.last) + 1) if whole else _ticks(chart.last):
        x = max(chart.x(value), LABELS)
        canvas.line(x, bottom, x, bottom + 4)
        words = f"{value}" if whole else f"{value / 1e6:g} M"
        canvas.text(x, bottom + 18, words, "middle", 12)
    canvas.text((LABELS + right) / 2, bottom + 38, across, "middle")
    canvas.text(20, chart.top + 14, "context", size=13)
    canvas.text(20, chart.top + 30, "(tokens)", size=12)


def _ticks(end: float) -> list[int]:
    """Round numbers from 0 to `end`, at most TICKS + 1 of them."""
    power = 10 ** (len(str(int(end / TICKS))) - 1)
    step = next(n * power for n in (1, 2, 5, 10) if n * power * TICKS >= end - n * power)
    return list(range(0, int(end) + 1, step))


def _pixel_fits(found: Report) -> list[Fit]:
    model = found.model.config
    assert model.image_processor is not None
    low, high = model.image_processor.min_pixels, model.image_processor.max_pixels
    caps = [low + (high - low) * i // (COLUMNS - 1) for i in range(COLUMNS)]
    slots = found.planned.plan.limits.slots
    return [fit_of(found.planned, model, found.budget.bytes, slots, cap) for cap in caps]


def _slot_fits(found: Report) -> list[Fit]:
    most = max(8, found.planned.plan.limits.slots)
    model, budget = found.model.config, found.budget.bytes
    return [fit_of(found.planned, model, budget, slots, 0) for slots in range(1, most + 1)]
