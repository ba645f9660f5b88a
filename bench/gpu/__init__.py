"""Identity and speed of the CUDA backend, on a machine with a GPU."""
