"""Tests on several gloo processes of this machine: the pool that runs them, and the models they train."""
