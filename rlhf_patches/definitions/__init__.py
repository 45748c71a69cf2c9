"""What a patch is, where patches come from, and the words in which their state is told."""
