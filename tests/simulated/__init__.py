"""A simulated accelerator, on which the order of what the engine does is proven where there is none.

`order.hpp` has the clocks and what is a race, `device.cpp` the device as PyTorch sees it, `group.py` process groups
that work on a stream of their own, `device.py` registers all of it. `mutations.py` takes waits out of src/ and sees
that each is found (`python -m tests.simulated.mutations`).
"""
