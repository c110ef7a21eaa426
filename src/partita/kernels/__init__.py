"""The arithmetic of an update: C++ for the CPU, and the same in plain torch, for other devices and without a compiler.

Everything works on flat buffers. :mod:`partita.kernels.state` has the forms they come in, :mod:`partita.kernels.update`
is what to call.
"""
