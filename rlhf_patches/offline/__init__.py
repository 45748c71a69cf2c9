"""What patches would do: here, or to a release that is not installed. From text alone."""
