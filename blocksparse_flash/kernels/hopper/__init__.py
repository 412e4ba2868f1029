"""The Gluon kernels for Hopper (sm90): TMA, wgmma and warp specialization."""
