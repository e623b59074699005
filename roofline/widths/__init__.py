"""Helps to choose widths: what a width costs against its aligned neighbours, and shapes of equal parameter count."""
