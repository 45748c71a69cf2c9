"""What the watches of all frameworks have in common."""
