"""Proofs: a framework's own function as released, then with a patch, held against a yardstick.

proof            Proof, Case, Row: what a proof says
states           for its worker: what is observed as released, patched, and reverted
found            which patch has a proof, and where
children         a proof's ranks, in processes with limits
rank             what such a process runs
"""
