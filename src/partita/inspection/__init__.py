"""Full tensors of a running engine by name: parameters, gradients and optimizer states."""
