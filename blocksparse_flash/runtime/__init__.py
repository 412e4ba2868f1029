"""Launching Triton and Gluon kernels: cache keys, TMA, the cached launcher, tracing. Nothing here knows attention."""
