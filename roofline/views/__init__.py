"""What a person sees: figures (SVG and PNG), tables of the terminal, the page. Nothing is computed here."""
