"""The commands about a GPU: bench, fit, gpus, roofline, kernels, compare, import, report, tune-kernels."""
