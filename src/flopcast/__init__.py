"""flopcast: what a training step costs on a GPU, before you rent it."""

__version__ = "0.1.0"
