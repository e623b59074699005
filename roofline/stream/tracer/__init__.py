"""Runs a real training step on fake tensors under CUDA's rules and records it. The only room that imports torch."""
