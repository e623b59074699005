"""Fits the law of collectives to published tables and judges it by machines that it was not fitted to."""
