"""The op stream of a step: what it launches. A model and how it is run (`model/`) are traced on fake tensors
(`tracer/`) into an op stream, which is data (`ops/`); one trace serves other depths, widths, batches and accumulations.
`lowering/` determines for each operation which kernels it launches and what they read, write and compute. `library/`
finds the stream of a model: shipped, cached or traced. `compiled/` reads what a compiled step launches from the code
that inductor generates. Only `tracer/` imports torch.
"""
