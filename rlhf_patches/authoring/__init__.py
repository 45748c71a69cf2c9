"""For authors of patches: questions about upstream's code, and a generated plugin."""
