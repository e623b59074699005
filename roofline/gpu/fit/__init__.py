"""From measured rows to a profile: one time a row, surfaces by kind of kernel, the host, several cards, the residuals."""
