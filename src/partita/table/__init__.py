"""The state table: where each state is stored, in which encoding, and how it moves. No tensors, no devices, no process
groups.
"""
