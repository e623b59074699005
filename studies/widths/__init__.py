"""Compares forecast penalties of widths with those measured on real steps."""
