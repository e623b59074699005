"""How the time of a kernel follows from its sizes: one law per kind of kernel. numpy only; a law knows no profile."""
