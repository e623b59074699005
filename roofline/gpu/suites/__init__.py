"""What is measured of a GPU: the cases of each suite, drawn and from real steps, some of them held out of the fit."""
