"""Pure arithmetic of states: where each is stored, how it moves and is laid out. No devices, no process groups."""
