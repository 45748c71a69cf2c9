"""Patches of PEFT."""
