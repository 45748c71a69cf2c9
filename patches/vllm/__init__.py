"""Watches of vLLM."""
