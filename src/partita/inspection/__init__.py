"""Full tensors by name, under every mesh, to read and to change. Knows no file format."""
