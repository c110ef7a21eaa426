"""The real engine as one rank of a cluster that does not exist: the memory that it holds, and the messages that it
sends.
"""
