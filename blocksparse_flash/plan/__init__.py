"""Plans of layouts: the 128 x 128 tiles that kernels iterate over, built on the host or on the device."""
