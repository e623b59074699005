"""The page of a GPU and the index of pages: sections, tables, words, made of data that is at hand."""
