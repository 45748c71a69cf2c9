"""Patches of OpenRLHF."""
