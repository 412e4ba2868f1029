"""Tables and plots of result lines."""
