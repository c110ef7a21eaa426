"""The kernels of updates and codecs: C++ for the CPU, Triton for accelerators, and the same in plain torch, for other
devices and without a compiler.

All kernels work on flat buffers. :mod:`partita.kernels.state` defines the states that an update works on,
:mod:`partita.kernels.update` has the functions to call.
"""
