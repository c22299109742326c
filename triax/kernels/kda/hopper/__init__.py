"""KDA on Hopper in CUDA C++: the flash form's kernels for heads of 128 channels, in bf16."""
