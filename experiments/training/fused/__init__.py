"""Networks of one shape, trained together as one program of Triton kernels."""
