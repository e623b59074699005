"""Records real compiled training steps: the code that inductor generated, what was launched, and how long it took."""
