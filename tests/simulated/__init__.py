"""A simulated accelerator, which checks the order of the engine's operations on machines without a real one.

`order.hpp` has the clocks and defines races, `device.cpp` has the device for PyTorch, `group.py` has process groups
with their own stream, and `device.py` registers everything. `mutations.py` removes waits from src/ and checks that each
removal is found (`python -m tests.simulated.mutations`).
"""
