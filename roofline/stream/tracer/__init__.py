"""Runs a real training step on fake tensors under CUDA's rules and records it.

Only this part of `stream` imports torch.
"""
