"""Launching Triton and Gluon kernels: tensor specs, TMA descriptors, the cached launcher, tracing."""
