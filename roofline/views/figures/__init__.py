"""Figures, each a function from rows to a drawing; no terminal, no page."""
