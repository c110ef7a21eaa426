"""Units at run time: unsharded before use, their gradients reduced, their updates published. Knows no optimizer, and no
compression by name.
"""
