"""Tiny models of transformers' classes, from rules, and what they are trained on."""
