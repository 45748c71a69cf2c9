"""The processes of a run: whether they are alike, and what they have said."""
