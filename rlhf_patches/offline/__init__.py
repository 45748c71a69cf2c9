"""Judge what patches would do, here or in a release that is not installed, from text alone."""
