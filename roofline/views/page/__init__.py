"""Makes the page of a GPU and the index of pages from data at hand: sections, tables, text."""
