"""What a step costs the host: tiny models of several depths, and Triton's operators."""
