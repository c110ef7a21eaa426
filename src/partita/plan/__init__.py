"""Pure arithmetic: where each training state rests, how it moves, how it is laid out. No devices, no process groups."""
