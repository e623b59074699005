"""Steps on several GPUs, recorded for real and compared with what is traced."""
