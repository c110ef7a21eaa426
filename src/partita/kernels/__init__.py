"""The kernels of updates and codecs: C++ for the CPU, Triton for accelerators, and a fallback in plain torch.

All kernels work on flat buffers. :mod:`partita.kernels.state` defines the states that an update works on;
:mod:`partita.kernels.update` has the functions to call.
"""
