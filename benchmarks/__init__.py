"""What does it cost, and what does it learn? Measurements and experiments; nothing in the library imports them."""
