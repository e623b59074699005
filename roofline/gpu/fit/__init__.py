"""From measured rows to a profile: a time for each row, surfaces by kind of kernel, the host, cards, residuals."""
