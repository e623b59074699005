"""How fast the Triton kernels are beside the libraries' and beside torch.compile, in one run. Need a GPU."""
