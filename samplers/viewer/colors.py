"""The colours of a canvas, the same on terminals, pages and pictures.

The scale is a straight line in OKLab (Ottosson 2020) from dark blue to light yellow. Its lightness always rises, and
red-green colour blindness leaves blue against yellow, so everybody sees the same order.
"""

from collections.abc import Sequence
from typing import NamedTuple

RGB = tuple[int, int, int]

STEPS = 33
"""Number of colours of the scale."""

_FIRST, _LAST = (0.30, 0.0, -0.11), (0.93, -0.03, 0.155)
_TO_LMS = ((1, 0.3963377774, 0.2158037573), (1, -0.1055613458, -0.0638541728), (1, -0.0894841775, -1.2914855480))
_TO_RGB = (
    (4.0767416621, -3.3077115913, 0.2309699292),
    (-1.2684380046, 2.6097574011, -0.3413193965),
    (-0.0041960863, -0.7034186147, 1.7076147010),
)

PAPER = """
  --paper: light-dark(#fbfaf7, #16171a); --ink: light-dark(#1d1d1f, #e8e6e1);
  --dim: light-dark(#6d6963, #9a968e); --line: light-dark(#dcd8d0, #33353a); --card: light-dark(#ffffff, #1e2024);
  --fresh: light-dark(#12824c, #35c07f); --fresh-ink: light-dark(#ffffff, #0b1510);
  --guess: light-dark(#9a5b00, #f0a93f); --accent: light-dark(#2456c8, #8db0ff);
"""
"""The other colours of pages, as CSS for light and dark; dim text has a contrast of 4.5 on paper and cards."""


class Colour(NamedTuple):
    """A colour of the scale, and black or white for text on it (with a contrast of at least 4.5)."""

    ground: RGB
    ink: RGB

    @property
    def css(self) -> tuple[str, str]:
        """Both as #rrggbb."""
        return as_hex(self.ground), as_hex(self.ink)


def colour_at(share: float) -> Colour:
    """The colour at a place of the scale, in [0, 1]."""
    return SCALE[round(min(max(share, 0.0), 1.0) * (STEPS - 1))]


def as_hex(colour: RGB) -> str:
    """#rrggbb."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def luminance(colour: RGB) -> float:
    """Relative luminance in [0, 1], as WCAG 2 defines it."""
    red, green, blue = ((c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: RGB, other: RGB) -> float:
    """Contrast ratio in [1, 21], as WCAG 2 defines it."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _colour(share: float) -> Colour:
    lab = [first + share * (last - first) for first, last in zip(_FIRST, _LAST, strict=True)]
    lms = [_dot(row, lab) ** 3 for row in _TO_LMS]
    red, green, blue = (_encoded(_dot(row, lms)) for row in _TO_RGB)
    ground = (red, green, blue)
    return Colour(ground, max(((0, 0, 0), (255, 255, 255)), key=lambda ink: contrast(ground, ink)))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _encoded(linear: float) -> int:
    """Linear light as sRGB, clipped."""
    x = min(max(linear, 0.0), 1.0)
    return round(255 * (12.92 * x if x <= 0.0031308 else 1.055 * x ** (1 / 2.4) - 0.055))


SCALE = tuple(_colour(i / (STEPS - 1)) for i in range(STEPS))
