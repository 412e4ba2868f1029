"""NumPy arithmetic on block lists: what a BlockLayout stores and computes, without torch in its loops."""
