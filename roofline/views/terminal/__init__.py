"""Prints the output of commands: tables, lines, progress."""
