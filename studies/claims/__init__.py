"""The source article's claims, tested under several price lists: remakes reports/economics."""
