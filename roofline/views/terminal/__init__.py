"""What commands print: tables, lines, progress."""
