"""Measures what joins GPUs: collectives and what NCCL picks for them, what launching them costs the host, kernels
beside them, copies between host and device. A process per GPU (`worker.py`), started by torch's own launcher
(`launch.py`) or by the user's, torchrun or srun.
"""
