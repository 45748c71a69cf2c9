"""Proofs: run a framework's own function as released, then with a patch, and compare both with a reference.

proof            Proof, Case, Row: the definition and the results of a proof
states           for workers: observe a patch's states: as released, patched, and reverted
lookup           the proof of each patch
children         a proof's ranks, in processes with limits
keeper           ends the ranks if the command is killed
rank             the main program of a rank
"""
