"""Rectangles, lines and words as SVG or as PNG. In grey: what differs differs by hatching too.

Coordinates are pixels from the top left; a PNG has twice as many of them. Pillow draws it, which
the runtime needs anyway, so a picture asks for no library more.
"""

import html
from io import BytesIO
from typing import Literal, Protocol

from PIL import Image, ImageDraw, ImageFont

Hatch = Literal["", "/", "\\", "x", "-", "|", "+"]
Anchor = Literal["start", "middle", "end"]
PITCH = 7  # pixels from one line of a hatching to the next
PNG_SCALE = 2


class Canvas(Protocol):
    """What a drawing needs."""

    def rect(self, x: float, y: float, w: float, h: float, grey: int, hatch: Hatch = "") -> None:
        """A filled box with a thin border."""
        ...

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        """A black line."""
        ...

    def text(
        self, x: float, y: float, words: str, anchor: Anchor = "start", size: int = 13
    ) -> None:
        """Words on the base line y."""
        ...


class SvgCanvas:
    """Writes SVG 1.1 with patterns for hatching."""

    def __init__(self, width: int, height: int) -> None:
        self._size = (width, height)
        self._parts: list[str] = []
        self._patterns: dict[tuple[int, Hatch], str] = {}

    def rect(self, x: float, y: float, w: float, h: float, grey: int, hatch: Hatch = "") -> None:
        """A filled box with a thin border."""
        fill = f"url(#{self._pattern(grey, hatch)})" if hatch else _hex(grey)
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" '
            'stroke="#000" stroke-width="0.7"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        """A black line."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#000" '
            f'stroke-width="1.2"{dash}/>'
        )

    def text(
        self, x: float, y: float, words: str, anchor: Anchor = "start", size: int = 13
    ) -> None:
        """Words on the base line y."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
            f"{html.escape(words)}</text>"
        )

    def _pattern(self, grey: int, hatch: Hatch) -> str:
        return self._patterns.setdefault((grey, hatch), f"h{len(self._patterns)}")

    def svg(self) -> str:
        """The whole picture."""
        width, height = self._size
        patterns = "".join(
            f'<pattern id="{name}" width="{PITCH}" height="{PITCH}" '
            f'patternUnits="userSpaceOnUse"><rect width="{PITCH}" height="{PITCH}" '
            f'fill="{_hex(grey)}"/><path d="{_path(hatch)}" stroke="#000" stroke-width="1" '
            'fill="none"/></pattern>'
            for (grey, hatch), name in self._patterns.items()
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">'
            f'<defs>{patterns}</defs><rect width="{width}" height="{height}" fill="#fff"/>'
            + "\n".join(self._parts)
            + "</svg>\n"
        )


class PngCanvas:
    """Draws with Pillow."""

    def __init__(self, width: int, height: int) -> None:
        self._image = Image.new("L", (width * PNG_SCALE, height * PNG_SCALE), 255)
        self._draw = ImageDraw.Draw(self._image)

    def rect(self, x: float, y: float, w: float, h: float, grey: int, hatch: Hatch = "") -> None:
        """A filled box with a thin border."""
        left, top = round(x * PNG_SCALE), round(y * PNG_SCALE)
        width, height = max(1, round(w * PNG_SCALE)), max(1, round(h * PNG_SCALE))
        box = Image.new("L", (width, height), grey)
        inside = ImageDraw.Draw(box)
        pitch = PITCH * PNG_SCALE
        for at in range(-height - height % pitch, width + height, pitch):
            if hatch in ("/", "x"):
                inside.line((at, height, at + height, 0), 0, PNG_SCALE)
            if hatch in ("\\", "x"):
                inside.line((at, 0, at + height, height), 0, PNG_SCALE)
            if hatch in ("|", "+"):
                inside.line((at, 0, at, height), 0, PNG_SCALE)
        for at in range(pitch // 2, height, pitch):
            if hatch in ("-", "+"):
                inside.line((0, at, width, at), 0, PNG_SCALE)
        inside.rectangle((0, 0, width - 1, height - 1), outline=0)
        self._image.paste(box, (left, top))

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        """A black line."""
        length = max(abs(x2 - x1), abs(y2 - y1), 1e-9)
        pieces = [(i / length, min(1.0, (i + 5) / length)) for i in range(0, int(length), 9)]
        for start, end in pieces if dashed else [(0.0, 1.0)]:
            ends = [(x1 + (x2 - x1) * t, y1 + (y2 - y1) * t) for t in (start, end)]
            self._draw.line([(x * PNG_SCALE, y * PNG_SCALE) for x, y in ends], 0, PNG_SCALE)

    def text(
        self, x: float, y: float, words: str, anchor: Anchor = "start", size: int = 13
    ) -> None:
        """Words on the base line y."""
        font = ImageFont.load_default(size * PNG_SCALE)
        place = {"start": "ls", "middle": "ms", "end": "rs"}[anchor]
        self._draw.text((x * PNG_SCALE, y * PNG_SCALE), words, 0, font, anchor=place)

    def png(self) -> bytes:
        """The whole picture."""
        out = BytesIO()
        self._image.save(out, "PNG", optimize=True)
        return out.getvalue()


def _hex(grey: int) -> str:
    return f"#{grey:02x}{grey:02x}{grey:02x}"


def _path(hatch: Hatch) -> str:
    p, half = PITCH, PITCH / 2
    # A diagonal is drawn three times, so that its corners meet across the tiles.
    up = f"M-1,1 L1,-1 M0,{p} L{p},0 M{p - 1},{p + 1} L{p + 1},{p - 1}"
    down = f"M-1,{p - 1} L1,{p + 1} M0,0 L{p},{p} M{p - 1},-1 L{p + 1},1"
    across, along = f"M0,{half} L{p},{half}", f"M{half},0 L{half},{p}"
    paths = {"": "", "/": up, "\\": down, "x": up + down, "-": across, "|": along}
    return paths.get(hatch, across + along)
