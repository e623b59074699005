"""What one rank launches of a step on several GPUs, traced on a machine without one.

    world.py   a process group of ranks that are not there, and CUDA streams that are followed
    trace.py   the op stream of one rank's step
    ddp.py     DistributedDataParallel's reducer on fake tensors

FSDP, DDP, DTensor and the pipeline's schedules are the installed torch's own; what they launch is recorded.
"""
