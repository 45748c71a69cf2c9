"""Whether a patch fits a piece of code: by its version, and by its text."""
