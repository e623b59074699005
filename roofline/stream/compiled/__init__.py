"""What a compiled step launches: the text that inductor generates for its graphs, read as data.

    launches.py       what one launch is, and a graph of them with the life of its buffers
    kernel_source.py  what a generated Triton kernel reads and writes, from its source
    instructions.py   what it computes besides
    output_code.py    the text of a graph's wrapper, statement by statement
    reuse.py          how long ago a launch's operands were touched
    profiled.py       launches joined to the kernels that a profiler saw
    compare.py        two lists of launches, side by side by kind
    layers.py         the list of a deep model from those of two and three layers
    generated_kernel.py  what the time of a generated kernel depends on, and its op
    versions.py       what another torch's code is worth
    to_rank.py        the op stream of one rank's compiled step, from its recorded calls and its graphs' launches
    to_stream.py      the op stream of a compiled step, with the eager step's optimizer

Nothing here imports torch: the text is Python, and is parsed as such.
"""
