"""Patches of Math-Verify, which compares mathematical answers for verl, TRL and others."""
