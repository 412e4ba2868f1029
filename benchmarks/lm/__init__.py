"""A small language model on long text: dense, local and selected attention on the same tokens."""
