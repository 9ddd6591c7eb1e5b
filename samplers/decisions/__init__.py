"""Typed decisions: choices and scores read from the canvas."""
