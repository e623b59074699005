"""Draws figures, each with a function from data to a drawing; depends on neither terminal nor page."""
