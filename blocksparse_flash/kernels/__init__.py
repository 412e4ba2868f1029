"""What computes attention? One file a backend; each receives tensors and a plan's tensors, and has never heard of BlockLayout."""
