"""What torch.compile makes of a step on a GPU, found on a machine without one.

    asked.py        which step, which GPU, what comes back; without torch
    apart.py        asks a process of its own, within a time limit; without torch
    process.py      that process
    side_by_side.py asks a pool of processes for many steps; without torch
    output_code.py  builds steps, compiles and runs them on fake tensors, keeps what inductor generates
    rank.py         compiles one rank's step of several GPUs and records what surrounds its graphs
    inductor.py     lets inductor generate code for a GPU that is not there
    padding.py      whether a product would be found faster padded
    fake_gpu.py     what torch.cuda, Triton and inductor are told of the GPU
    fake_cuda.py    fake tensors that are CUDA's for Python and of no device for autograd
    attention.py    which fused kernel scaled_dot_product_attention calls

Dynamo, AOTAutograd and inductor are the installed torch's own and unchanged; they are given a GPU that is not there,
and nothing they generate is loaded or run. For that the process changes torch's internals, which is why it ends after
one answer, or serves one GPU alone. A change here that gives other code raises `stream/library/code.COMPILER`.
"""
