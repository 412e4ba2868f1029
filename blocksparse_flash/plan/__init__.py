"""Plans of layouts: the tiles that kernels iterate over, built on the host or on the device."""
