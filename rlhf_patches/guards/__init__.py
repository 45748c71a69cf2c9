"""Guards: whether a patch matches a framework's code, by its version and by its text."""
