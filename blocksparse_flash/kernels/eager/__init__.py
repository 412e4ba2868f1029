"""Block-sparse flash attention in plain PyTorch, on any device."""
