"""The canvas viewer: what was written when, for notebooks, terminals, pages and pictures (docs/viewer.md)."""

from samplers.viewer.view import View, compare, show

__all__ = ["View", "compare", "show"]
