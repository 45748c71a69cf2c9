"""The processes of a run: comparison of their patches, and their report files."""
